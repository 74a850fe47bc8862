"""Runs of a scheduler's test while they go on: their end, and ranks that are held."""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

GOING = ("pending", "running", "unknown")
_STEP_S = 0.5
_STEPS_BETWEEN_QUESTIONS = 20


def wait_for_end(run_dir: Path, status: Callable[[], dict[str, Any]], report: Callable[[], str]) -> dict[str, Any]:
    """Status of a run that has ended.

    Each llmctl costs half a second of the processors that the job needs. So it is asked seldom until the run has left
    the file that all runs leave but those that were killed or never began.
    """
    run: dict[str, Any] = {}
    steps = itertools.count()

    def has_ended() -> bool:
        if next(steps) % _STEPS_BETWEEN_QUESTIONS and not _has_left(run_dir):
            return False
        run.update(status())
        return run["state"] not in GOING

    wait_for(has_ended, lambda: f"{run}\n{report()}", step_s=_STEP_S)
    return run


def _has_left(run_dir: Path) -> bool:
    attempts = [path for path in run_dir.glob("attempts/*") if path.name.isdigit()]
    return bool(attempts) and (max(attempts, key=lambda path: int(path.name)) / "exit.json").exists()


@contextmanager
def held(run_dir: Path) -> Iterator[list[int]]:
    """Stop all ranks of a run, which would only use the processors; they go on at the end. Yields their pids."""
    pids = ranks_of(run_dir)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def ranks_of(run_dir: Path) -> list[int]:
    """Ranks on all nodes, as this machine numbers them. Launchers have the same words behind their own."""
    rank = ["-m", "trainer", "pretrain", "--config", f"{run_dir}/config.yaml"]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            if rank in (words[1:], words[2:]) and "python" in words[0]:
                found.append(int(folder.name))
    return found


def words_of(pid: int, name: str) -> list[str]:
    """Words of a process: ``cmdline`` or ``environ``."""
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")


def supervisor_of(run_dir: Path, node: int = 0) -> int:
    """Process id of the supervisor on the head node, or on another machine, as this machine numbers the process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = words_of(int(folder.name), "cmdline")
            if f"{run_dir}/job.json" in words and "python" in words[0] and "node" not in words:
                # Behind ssh the command ends with the numbers of the machine and of the first attempt.
                if int(words[-3] if words[-3].isdigit() else 0) != node:
                    continue
                found.append(int(folder.name))
    (pid,) = found
    return pid


def check_restart(site: Any, run_id: str) -> None:
    """Kill rank 1 of a run that may begin again: the next attempt trains on in the same job, after the newest save.

    Then cancel the run, which leaves no process.

    Args:
        site: of the scheduler.
        run_id: of a run with two ranks on two nodes.
    """
    wait_for(lambda: site.iteration(run_id) > 25, "iterations after a save")
    before = site.iteration(run_id)
    (pid,) = (pid for pid in ranks_of(site.path(run_id)) if "NODE_RANK=1" in words_of(pid, "environ"))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: site.iteration(run_id) > before + 20, lambda: f"a second attempt\n{site.job_log(run_id)}")
    first = json.loads((site.path(run_id) / "attempts/1/exit.json").read_text())
    assert (first["reason"], first["restarts"], first["most_attempts"]) == ("failed", True, 2), first
    assert first["class"] == "killed" and first["saved"] > 0 and first["lost_steps"] < 40, first
    started = [json.loads((site.path(run_id) / f"attempts/{number}/started.json").read_text()) for number in (1, 2)]
    assert len({(one["job_id"], one["host"], one["pid"]) for one in started}) == 1
    rows = map(json.loads, (site.path(run_id) / "metrics.jsonl").read_text().splitlines())
    assert next(row["iteration"] for row in rows if row["attempt"] == 2) == first["saved"] + 1
    run = site.status(run_id)
    assert (run["state"], run["attempt"], run["submission"], len(run["job_ids"])) == ("running", 2, 1, 1), run
    site.llmctl("cancel", run_id)
    run = site.ended(run_id)
    assert run["state"] == "cancelled" and not (site.path(run_id) / "attempts/3").exists(), run
    wait_for(lambda: not ranks_of(site.path(run_id)), "the end of all ranks")


def check_hang(site: Any, run_id: str) -> None:
    """Stop rank 1 of a run that may begin again: the job ends the hang by itself, and the next attempt trains on.

    Then cancel the run. Prints the seconds that it has taken.

    Args:
        site: of the scheduler.
        run_id: of a run with two ranks on two nodes, whose hang timeout is 30 s.
    """
    wait_for(lambda: site.iteration(run_id) > 25, "iterations after a save")
    # A rank that is stopped before it has written that it trains cannot be told from one that starts.
    beats = site.path(run_id) / "attempts/1/heartbeat"
    wait_for(
        lambda: all(json.loads(path.read_text())["iteration"] for path in beats.glob("rank-*.json")),
        "heartbeats of ranks that train",
    )
    before = ranks_of(site.path(run_id))
    (pid,) = (pid for pid in before if "NODE_RANK=1" in words_of(pid, "environ"))
    os.kill(pid, signal.SIGSTOP)
    times = {"stopped": time.monotonic()}
    for what, sign in (("told", "llmctl: hang: "), ("judged", "is ended because of the hang")):
        wait_for(lambda sign=sign: sign in site.job_log(run_id), lambda sign=sign: f"{sign}\n{site.job_log(run_id)}")
        times[what] = time.monotonic()
    wait_for(lambda: not any(Path(f"/proc/{one}/exe").exists() for one in before), "the end of all ranks")
    times["gone"] = time.monotonic()
    iteration = site.iteration(run_id)
    wait_for(lambda: site.iteration(run_id) > iteration, lambda: f"a second attempt\n{site.job_log(run_id)}")
    times["new step"] = time.monotonic()
    print(run_id, {what: round(moment - times["stopped"], 1) for what, moment in times.items()})
    first = json.loads((site.path(run_id) / "attempts/1/exit.json").read_text())
    assert (first["reason"], first["class"], first["restarts"], first["code"]) == ("failed", "hang", True, 1), first
    beat = json.loads((site.path(run_id) / "attempts/1/heartbeat/rank-00001.json").read_text())
    assert re.match(
        rf"rank 1 on {beat['host']} \(phase .*\) (is stopped|has not).*; rank 0 waits for it", first["cause"]
    ), (beat, first)
    site.llmctl("cancel", run_id)
    assert site.ended(run_id)["state"] == "cancelled"
    wait_for(lambda: not ranks_of(site.path(run_id)), "the end of all ranks")
