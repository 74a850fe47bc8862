"""Whether a process or thread that works for us still lives, or hangs; seen from outside, without a word of its own.

What lives spends time on a CPU, if only microseconds while it waits for a slow file system. What hangs (a dead server
of files, a stopped process, a lock that nobody gives back) spends none. A heartbeat of its own would tell less: it goes
on in a thread beside one that hangs, and stops where a library keeps Python's lock while it works.
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

TOLD_AFTER_S = 60.0
"""Of silence, or less where the run has less patience: file systems that fail over take about so long."""
_LOOK_EVERY_S = 1.0
_STATES = {
    "D": "waits for a disk or file system",
    "R": "is runnable and gets no CPU",
    "S": "sleeps",
    "T": "was stopped by a signal",
    "t": "was stopped by a debugger",
}
"""Letters of proc(5), as far as they can belong to a process that hangs."""


class Worker(Protocol):
    """A process or thread that something is waited for from."""

    @property
    def name(self) -> str:
        """It, at the beginning of a sentence."""

    @property
    def proc(self) -> Path:
        """Its folder below /proc."""

    @property
    def work(self) -> str:
        """What it does, to follow "while it"."""

    def give_up(self, reason: str) -> None:
        """End it and let who waits for it raise an error of ``reason``. For another thread than the one that waits."""


@dataclass
class _Waiting:
    """What is waited for.

    Attributes:
        turn: the wait, which is another one for each piece, of the same process too.
        began: when waiting did, on the monotonic clock.
        life: when the worker showed the last sign of life, on the same.
        spent: what it had spent on CPUs then.
        is_told: a line has been said of its silence.
        is_long: a line has been said of its long work.
    """

    turn: tuple[Worker]
    began: float
    life: float
    spent: tuple[int, ...]
    is_told: bool = False
    is_long: bool = False


class SilenceWatch:
    """Looks once a second at who is waited for; says when it is silent, and gives it up in the end."""

    def __init__(self, patience_s: float, say: Callable[[str], None], told_s: float = TOLD_AFTER_S) -> None:
        """Nothing is waited for yet.

        Args:
            patience_s: of silence after which one is given up; infinity: never.
            say: takes a line about one that is silent, once for each wait, or at work for long.
            told_s: of silence after which it is told of at the latest.
        """
        self._patience_s = patience_s
        self._told_s = min(told_s, patience_s / 2)
        self._say = say
        self._turn: tuple[Worker] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, worker: Worker | None) -> None:
        """What is waited for from now on; None: nothing. Costs next to nothing, and is for one thread."""
        self._turn = None if worker is None else (worker,)
        if self._thread is None and worker is not None:
            self._thread = threading.Thread(target=self._run, name="silence", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        seen: _Waiting | None = None
        while not self._ended.wait(min(_LOOK_EVERY_S, self._told_s / 4)):
            turn = self._turn
            if turn is None:
                seen = None
            elif seen is None or seen.turn is not turn:
                now = time.monotonic()
                seen = _Waiting(turn, now, now, _spent_ns(turn[0].proc))
            else:
                self._look(seen)

    def _look(self, seen: _Waiting) -> None:
        (worker,) = seen.turn
        now, spent = time.monotonic(), _spent_ns(worker.proc)
        if spent != seen.spent:
            seen.spent, seen.life = spent, now
            if now - seen.began >= self._patience_s and not seen.is_long:
                seen.is_long = True
                self._say(f"{worker.name} is at work for {now - seen.began:,.0f} s already while it {worker.work}")
            return
        silent_s = now - seen.life
        if silent_s >= self._patience_s:
            worker.give_up(
                f"{worker.name} {_state(worker.proc)}has been silent for {silent_s:,.0f} s while it {worker.work}; "
                "see to what it waits for and resume the run, or set parallel.distributed_timeout_minutes higher"
            )
            self._ended.set()
        elif silent_s >= self._told_s and not seen.is_told:
            seen.is_told = True
            what_then = "see to what it waits for"
            if math.isfinite(self._patience_s):
                what_then = f"after {self._patience_s:,.0f} s the run is ended"
            self._say(
                f"{worker.name} {_state(worker.proc)}has been silent for {silent_s:,.0f} s while it {worker.work}; "
                f"{what_then}"
            )


def _spent_ns(proc: Path) -> tuple[int, ...]:
    """What has been spent on CPUs, by thread; () where nothing tells."""
    found = []
    with suppress(OSError):
        threads = proc / "task"
        for thread in sorted(threads.iterdir()) if threads.is_dir() else [proc]:
            with suppress(OSError, ValueError):
                found.append(int((thread / "schedstat").read_text().split()[0]))
    if not found:
        with suppress(OSError, ValueError, IndexError):
            # The name, which may hold anything, is in parentheses; the 14th and 15th field count clock ticks.
            fields = (proc / "stat").read_text().rpartition(")")[2].split()
            found = [int(fields[11]), int(fields[12])]
    return tuple(found)


def _state(proc: Path) -> str:
    """Why it may be silent, in a clause that ends with ``and``; empty where nothing tells."""
    with suppress(OSError, IndexError, KeyError):
        return f"{_STATES[(proc / 'stat').read_text().rpartition(')')[2].split()[0]]} and "
    return ""
