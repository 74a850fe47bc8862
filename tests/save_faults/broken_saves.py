"""Every system call of a save, each failing once in a run of its own, and what the next attempt makes of it."""

import hashlib
import json
import shutil
from collections import Counter
from typing import NamedTuple

from tests.save_faults.attached import Strace, numbered, on_paths
from tests.save_faults.gated_run import AFTER, BEFORE, GATED, LAST, SAVED, GatedRun, finish, is_killed, write_config
from trainer.checkpoint.directory import checkpoint_path, find_latest, remove_leftovers
from trainer.checkpoint.verification import find_damage

CALLS = (
    *(
        "openat",
        "mkdir",
        "mkdirat",
        "write",
        "writev",
        "pwrite64",
        "pwritev",
        "pwritev2",
        "fsync",
        "fdatasync",
        "sync_file_range",
    ),
    *("close", "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "rmdir", "ftruncate"),
    *("read", "pread64", "preadv", "preadv2", "getdents64", "fadvise64"),
)
"""System calls that read or write a folder of checkpoints."""
READS = ("read", "pread64", "preadv", "preadv2", "getdents64", "fadvise64", "unlink", "unlinkat", "rmdir")
"""Those that need no room on the disk."""
ERRORS = ("EIO", "ENOSPC", "SIGKILL")


class Fault(NamedTuple):
    """The ``number``-th of a save's system calls of one name, with an error, or SIGKILL instead of the call."""

    call: str
    number: int
    error: str

    @property
    def option(self):
        """For strace."""
        kind = "signal=KILL" if self.error == "SIGKILL" else f"error={self.error}"
        return f"inject={self.call}:{kind}:when={self.number}"


class Result(NamedTuple):
    """The end of a case: if the save was told as missed, and the iteration from which the next attempt went on."""

    end: str
    resumed: int


class BrokenSaves:
    """All cases of synchronous or asynchronous saves, in folders below ``folder``."""

    def __init__(self, folder, is_async):
        """Make a run that has one checkpoint, and one that was never interrupted."""
        self.folder = folder
        self.is_async = is_async
        self.number = 0
        folder.mkdir()
        whole = folder / "whole"
        write_config(whole, is_async=False)
        self.tensors = {}
        with GatedRun(whole, 1, folder / "gates") as run:
            assert run.reaches(BEFORE)
            self.tensors[SAVED] = tensors(whole, SAVED)
            run.pass_gate()
            assert run.reaches(AFTER)
            self.tensors[GATED] = tensors(whole, GATED)
            run.pass_gate()
            assert run.ends() == 0
        self.tensors[LAST] = tensors(whole, LAST)
        self.begun = folder / "begun"
        write_config(self.begun, is_async)
        with GatedRun(self.begun, 1, folder / "gates") as run:
            assert run.reaches(BEFORE)
        self.paths = self.find_paths()

    def find_paths(self):
        """All paths in the folder of checkpoints that a save touches, relative to the run."""
        _, calls = self.trace(["-e", f"trace={','.join(f'?{name}' for name in CALLS)}"])
        run = str(self.folder / "run")
        found = {"checkpoints"}
        for _, _, arguments in calls:
            for mark in ('"', "<"):
                for part in arguments.split(mark + run + "/checkpoints/")[1:]:
                    found.add("checkpoints/" + part.split('"')[0].split(">")[0])
        return sorted(found)

    def count(self):
        """Name and number of each call of a save, in order."""
        options = on_paths(self.folder / "run" / path for path in self.paths)
        _, calls = self.trace([*options, "-e", f"trace={','.join(f'?{name}' for name in CALLS)}"])
        assert len({thread for thread, _, _ in calls}) == 1, "a save in several threads: strace counts for each"
        return numbered(calls)

    def faults(self):
        """Every case."""
        return [
            Fault(name, number, error)
            for name, number in self.count()
            for error in ERRORS
            if error != "ENOSPC" or name not in READS
        ]

    def start(self):
        """A new copy of the run with one checkpoint."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        return shutil.copytree(self.begun, run)

    def trace(self, options, left=None):
        """Save under strace; the exit code and the calls. ``left``: folder for what is there just after the save."""
        run = self.start()
        with GatedRun(run, 2, self.folder / "gates") as attempt:
            assert attempt.reaches(BEFORE), "the attempt ended before its save"
            with Strace(attempt.pid, self.folder / "strace", options) as strace:
                attempt.pass_gate()
                is_alive = attempt.reaches(AFTER)
            if is_alive and left is not None:
                shutil.copytree(run, left)
            if is_alive:
                attempt.pass_gate()
            code = attempt.ends()
        return code, strace.calls()

    def try_fault(self, fault):
        """One case.

        Raises:
            AssertionError: the run ended by an error of the disk, went on from damaged or other files, or had other
                results in the end.
        """
        left = self.folder / "left"
        shutil.rmtree(left, ignore_errors=True)
        options = on_paths(self.folder / "run" / path for path in self.paths)
        code, calls = self.trace([*options, "-e", f"trace={fault.call}", "-e", fault.option], left)
        run = self.folder / "run"
        if fault.error == "SIGKILL":
            assert is_killed(code), f"exit code {code}, {len(calls)} calls"
            shutil.copytree(run, left)
            end = "killed"
        else:
            # In the second of two lines if another thread has called something meanwhile.
            hits = (self.folder / "strace").read_text().count("(INJECTED)")
            assert hits == 1, f"{hits} calls have failed, of {calls}"
            assert code == 0, f"exit code {code}: {log(run, 2)}"
            assert tensors(run, LAST) == self.tensors[LAST], "the run that went on has another end"
            end = "missed" if any("missed_save" in row for row in rows(run)) else "saved"
        return Result(end, self.resume(left, end))

    def resume(self, run, end):
        """Go on from what is left; returns the iteration from which."""
        root = run / "checkpoints"
        pointed = int((root / "latest_checkpointed_iteration.txt").read_text())
        looked_at = shutil.copytree(root, self.folder / "looked at", dirs_exist_ok=False)
        try:
            remove_leftovers(looked_at)
            latest, _ = find_latest(looked_at)
            assert latest is not None, "no checkpoint is left"
            damage = find_damage(latest)
            assert damage is None, f"{latest.name} {damage}"
        finally:
            shutil.rmtree(looked_at)
        code, output = finish(run, 3)
        assert code == 0, f"the next attempt ended with {code}: {output}"
        found = [number for number in (SAVED, GATED) if f"at iteration {number}" in output]
        assert found == [int(latest.name.removeprefix("iter_"))] == [pointed], f"{found}, {latest}, {pointed}: {output}"
        assert found == [GATED] or end != "saved", "a save that was told as complete is gone"
        assert tensors(run, LAST) == self.tensors[LAST], "the next attempt has another end"
        return found[0]


def tensors(run, iteration):
    """Hash of each tensor file of a checkpoint."""
    folder = checkpoint_path(run / "checkpoints", iteration)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def rows(run):
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def log(run, number):
    """Output of the rank in an attempt."""
    return (run / "attempts" / str(number) / "rank-00000.log").read_text()


def table(results):
    """Lines of a table: calls and cases by kind of saves and name of the call."""
    names = sorted({(way, fault.call) for way, fault in results})
    lines = ["| saves | call | calls | cases | killed | missed | saved | went on from the older | from the new |"]
    lines.append("|" + " --- |" * 9)
    for way, name in names:
        here = {fault: result for (kind, fault), result in results.items() if (kind, fault.call) == (way, name)}
        ends = Counter(result.end for result in here.values())
        resumed = Counter(result.resumed for result in here.values())
        values = (len({fault.number for fault in here}), len(here), ends["killed"], ends["missed"], ends["saved"])
        cells = " | ".join(map(str, (*values, resumed[SAVED], resumed[GATED])))
        lines.append(f"| {way} | {name} | {cells} |")
    return "\n".join(lines)
