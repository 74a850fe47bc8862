"""Whether the run was asked to save and leave: by a file that job.sh touches, or by a signal. Torch-free."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from typing_extensions import Self

_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before they end a job: ``--signal`` of sbatch(1), ``-notify`` and s_rt of Grid Engine's qsub(1)
may reach every process of a job, and would otherwise end a rank that has not saved."""
_LOOK_EVERY_S = 1.0
"""Between two looks for the file: steps may take milliseconds, and the file system is shared by many."""


class StopRequest:
    """This process's view; ranks must agree before they act on it (trainer.training.loop does).

    As a context manager it catches schedulers' warnings meanwhile. Must then be used in the main thread, where Python
    runs signal handlers.
    """

    def __init__(self, file: Path | None) -> None:
        """Watch for ``file``; give it to one rank only, the others need no file-system traffic for it."""
        self._file = file
        self._signalled = False
        self._is_found = False
        self._next_look = 0.0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def is_made(self) -> bool:
        """True once asked."""
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
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        # A network file system remembers for up to a minute that a file was not there; opening its folder makes it look
        # again (nfs(5): close-to-open consistency holds for directories too).
        with suppress(OSError), os.scandir(self._file.parent) as names:
            next(names, None)
        self._is_found = self._file.exists()
        return self._is_found

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
