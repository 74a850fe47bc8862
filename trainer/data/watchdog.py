"""Watchdog: detect a worker process or thread that has died or hangs, from outside.

A live worker spends CPU time, if only microseconds while it waits for a slow file system. A worker that hangs (on a
dead file server, after SIGSTOP, or on a lock that is never released) spends none. A heartbeat from the worker would
be less reliable: its thread continues beside a thread that hangs, and stops while a library holds the GIL.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

REPORT_AFTER_S = 60.0
"""Seconds without CPU time before a report; less if the run's limit is short. File systems fail over in about a
minute."""
_POLL_S = 1.0
_STATES = {
    "D": "waits for a disk or file system",
    "R": "is runnable and gets no CPU",
    "S": "sleeps",
    "T": "was stopped by a signal",
    "t": "was stopped by a debugger",
}
"""State letters of proc(5), as far as a process that hangs can have them."""


class Worker(Protocol):
    """A process or thread whose result a reader waits for."""

    @property
    def name(self) -> str:
        """Name for the beginning of a sentence."""

    @property
    def proc(self) -> Path:
        """Folder below /proc."""

    @property
    def work(self) -> str:
        """Current work, to follow "while it"."""

    def give_up(self, reason: str) -> None:
        """End the worker, and raise an error of ``reason`` in the waiting thread.

        Called from another thread.
        """


@dataclass
class _Waiting:
    """The current wait.

    Attributes:
        turn: identity of the wait, different for each wait for the same worker.
        began: start of the wait, on the monotonic clock.
        life: last change of the worker's CPU time, on the monotonic clock.
        spent: CPU time at ``life``.
        is_reported: the worker's silence has been reported.
        is_long: the worker's long work has been reported.
    """

    turn: tuple[Worker]
    began: float
    life: float
    spent: tuple[int, ...]
    is_reported: bool = False
    is_long: bool = False


class Watchdog:
    """Checks, once a second, the worker that a reader waits for.

    Reports a silent worker, and finally gives it up.
    """

    def __init__(self, patience_s: float, say: Callable[[str], None], report_after_s: float = REPORT_AFTER_S) -> None:
        """Create a watchdog that does not wait for any worker yet.

        Args:
            patience_s: seconds of silence before the worker is given up; infinity for never.
            say: called with a line about a silent worker, once per wait, or about long work.
            report_after_s: maximum seconds of silence before the report.
        """
        self._patience_s = patience_s
        self._report_after_s = min(report_after_s, patience_s / 2)
        self._say = say
        self._turn: tuple[Worker] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, worker: Worker | None) -> None:
        """Start to wait for ``worker``; None to stop waiting. Cheap; for one thread only."""
        self._turn = None if worker is None else (worker,)
        if self._thread is None and worker is not None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the watchdog."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        seen: _Waiting | None = None
        while not self._ended.wait(min(_POLL_S, self._report_after_s / 4)):
            turn = self._turn
            if turn is None:
                seen = None
            elif seen is None or seen.turn is not turn:
                now = time.monotonic()
                seen = _Waiting(turn, now, now, _spent_ns(turn[0].proc))
            else:
                self._check(seen)

    def _check(self, seen: _Waiting) -> None:
        (worker,) = seen.turn
        now, spent = time.monotonic(), _spent_ns(worker.proc)
        if spent != seen.spent:
            seen.spent, seen.life = spent, now
            if now - seen.began >= self._patience_s and not seen.is_long:
                seen.is_long = True
                self._say(f"{worker.name} has been at work for {now - seen.began:,.0f} s while it {worker.work}")
            return
        silent_s = now - seen.life
        if silent_s >= self._patience_s:
            worker.give_up(
                f"{worker.name} {_state(worker.proc)}has been silent for {silent_s:,.0f} s while it {worker.work}; "
                "check what it waits for and resume the run, or raise parallel.distributed_timeout_minutes"
            )
            self._ended.set()
        elif silent_s >= self._report_after_s and not seen.is_reported:
            seen.is_reported = True
            consequence = "check what it waits for"
            if math.isfinite(self._patience_s):
                consequence = f"the run ends after {self._patience_s:,.0f} s of silence"
            self._say(
                f"{worker.name} {_state(worker.proc)}has been silent for {silent_s:,.0f} s while it {worker.work}; "
                f"{consequence}"
            )


def _spent_ns(proc: Path) -> tuple[int, ...]:
    """Return the CPU time spent, by thread; () if unknown."""
    found = []
    with suppress(OSError):
        threads = proc / "task"
        for thread in sorted(threads.iterdir()) if threads.is_dir() else [proc]:
            with suppress(OSError, ValueError):
                found.append(int((thread / "schedstat").read_text().split()[0]))
    if not found:
        with suppress(OSError, ValueError, IndexError):
            # The process name in parentheses may hold any character; fields 14 and 15 count clock ticks.
            fields = (proc / "stat").read_text().rpartition(")")[2].split()
            found = [int(fields[11]), int(fields[12])]
    return tuple(found)


def _state(proc: Path) -> str:
    """Describe the process state in a clause that ends with ``and``; "" if unknown."""
    with suppress(OSError, IndexError, KeyError):
        return f"{_STATES[(proc / 'stat').read_text().rpartition(')')[2].split()[0]]} and "
    return ""
