"""Requests to save and exit: a file that the supervisor creates, or a signal. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from typing_extensions import Self

_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send before they end a job: ``--signal`` of sbatch(1), ``-notify`` and s_rt of Grid Engine's
qsub(1) may reach every process of a job, and would otherwise end a rank before it has saved."""
_POLL_S = 1.0
"""Interval between checks for the file: the file system is shared."""


class StopRequest:
    """Stop request as seen by this process.

    Ranks must agree before they act (see trainer.training.loop).

    As a context manager it looks for the file, and catches the schedulers' warning signals. Enter it in the main thread
    only, where Python runs signal handlers.
    """

    def __init__(self, file: Path | None) -> None:
        """Watch for ``file``; pass it on one rank only, to spare the file system."""
        self._file = file
        self._is_made = False
        self._end = threading.Event()
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def is_made(self) -> bool:
        """True after a stop request; within a second or two of the file."""
        return self._is_made

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in _WARNINGS}
        if self._file is not None:
            self._look(self._file)
            # A thread of its own: a shared file system may take long to answer, and a step does not wait for it.
            threading.Thread(target=self._follow, args=(self._file,), name="stop request", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _follow(self, file: Path) -> None:
        while not self._is_made and not self._end.wait(_POLL_S):
            self._look(file)

    def _look(self, file: Path) -> None:
        # A network file system caches for up to a minute that a file did not exist; opening its folder refreshes the
        # cache (nfs(5): close-to-open consistency holds for directories too).
        with suppress(OSError), os.scandir(file.parent) as names:
            next(names, None)
        if file.exists():
            self._is_made = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_made = True
