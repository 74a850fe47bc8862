"""Stacks of this process's threads, for a run that hangs. Torch-free."""

from __future__ import annotations

import faulthandler
import os
import time
from contextlib import suppress
from pathlib import Path

WANTED = "stacks.wanted"
"""File of an attempt with which the supervisor asks all ranks for their stacks, each time that it grows."""
FOLDER = "stacks"
BLOCKED_S = 60.0
"""Time without the interpreter after which its stacks are written into the rank's log."""


class StackWriter:
    """Writes the stacks of all threads when the supervisor asks. For the thread of the heartbeat alone."""

    def __init__(self, attempt: Path, rank: int) -> None:
        """Write into ``attempt``, the attempt's folder."""
        self._attempt = attempt
        self._file = attempt / FOLDER / f"rank-{rank:05d}.txt"
        self._answered = 0

    def answer(self) -> bool:
        """Write the stacks, if they were asked for since the last time; True if so.

        A failure of the disk is ignored.
        """
        with suppress(OSError):
            # Listing makes a network file system drop its cached "no such file".
            if WANTED not in os.listdir(self._attempt):  # noqa: PTH208
                return False
            wanted = (self._attempt / WANTED).stat().st_size
            if wanted <= self._answered:
                return False
            self._answered = wanted
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(time.strftime("%Y-%m-%d %H:%M:%S\n"))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            return True
        return False


def watch_interpreter() -> None:
    """Write all stacks to stderr, the rank's log, if this is not called again in time.

    A C function that keeps the interpreter's lock stops every thread of Python, the heartbeat's too.
    """
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback_later(BLOCKED_S, file=2)
