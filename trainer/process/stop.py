"""Requests to save and exit: a file that the supervisor creates, or a signal. Torch-free."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from typing_extensions import Self

_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send before they end a job: ``--signal`` of sbatch(1), ``-notify`` and s_rt of Grid Engine's
qsub(1) may reach every process of a job, and would otherwise end a rank before it has saved."""
_POLL_S = 1.0
"""Interval between checks for the file: steps may take milliseconds, and the file system is shared."""


class StopRequest:
    """Stop request as seen by this process.

    Ranks must agree before they act (see trainer.training.loop).

    As a context manager it catches the schedulers' warning signals. Enter it in the main thread only, where Python runs
    signal handlers.
    """

    def __init__(self, file: Path | None) -> None:
        """Watch for ``file``; pass it on one rank only, to spare the file system."""
        self._file = file
        self._signalled = False
        self._is_found = False
        self._next_look = 0.0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def is_made(self) -> bool:
        """True after a stop request."""
        return self._signalled or self._is_file_there()

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in _WARNINGS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _is_file_there(self) -> bool:
        if self._file is None or self._is_found or time.monotonic() < self._next_look:
            return self._is_found
        self._next_look = time.monotonic() + _POLL_S
        # A network file system caches for up to a minute that a file did not exist; opening its folder refreshes the
        # cache (nfs(5): close-to-open consistency holds for directories too).
        with suppress(OSError), os.scandir(self._file.parent) as names:
            next(names, None)
        self._is_found = self._file.exists()
        return self._is_found

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
