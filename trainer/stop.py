"""Whether the run was asked to save and leave: by a file that job.sh touches, or by SIGTERM. Torch-free."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType

from typing_extensions import Self


class StopRequest:
    """This process's view; ranks must agree before they act on it (trainer.loop does).

    As a context manager it catches SIGTERM meanwhile. Must then be used in the main thread, where Python runs signal
    handlers.
    """

    def __init__(self, file: Path | None) -> None:
        """Watch for ``file``; give it to one rank only, the others need no file-system traffic for it."""
        self._file = file
        self._signalled = False
        self._previous: signal._HANDLER = signal.SIG_DFL

    def is_made(self) -> bool:
        """True once asked."""
        return self._signalled or (self._file is not None and self._file.exists())

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
