"""Runs of a scheduler's test while they go on: their end, and ranks that are held."""

import itertools
import os
import signal
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
