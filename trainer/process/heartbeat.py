"""Heartbeat file of each rank: its current phase and the phase's start time. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from trainer.process.run_directory import write_json

_SECONDS_BETWEEN_WRITES = 1.0
_PAGE_BYTES = 4096
KERNEL_BUILD = "building the kernels"
"""Phase of the ranks while kernels are built. The rank that builds adds the percent, the others wait (state.py)."""
_WARNING_IF_FULL = 1000


class Heartbeat:
    """Keeps a file up to date with this rank's iteration and phase.

    A separate thread writes, at most once per second and only after a change. So training never waits for the file
    system, ``time`` is the time of the last progress, and a rank that hangs in a collective records that phase, even
    if the phase began right after the last write.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        """Write to ``path``; None disables writing. Use as a context manager."""
        self._path = path
        self._fixed = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._warnings: dict[str, str] = {}
        self._warning = ""
        self._beside = ""
        self._peak_memory_bytes = 0
        self._latest: tuple[int, str, float] = (0, "start", time.time())
        self._written: tuple[int, str, float, str, str, int] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def beat(self, iteration: int, phase: str) -> None:
        """Record the start of ``phase``."""
        self._latest = (iteration, phase, time.time())

    def warn(self, sentence: str, about: str = "checkpoint") -> None:
        """Show a sentence beside the phase from now on; "" takes that about the same back. From any thread."""
        self._warnings[about] = sentence
        self._warning = "; ".join(each for each in list(self._warnings.values()) if each)

    def show_beside(self, what: str) -> None:
        """Show work beside that of the phase, such as a build, from now on; "" takes it back. From any thread."""
        self._beside = what

    def note_memory(self, peak_bytes: int) -> None:
        """Record the most memory that this rank has used so far."""
        self._peak_memory_bytes = peak_bytes

    @property
    def phase(self) -> str:
        """Current phase of this rank."""
        return self._latest[1]

    def __enter__(self) -> Self:
        if self._path is not None:
            self._write()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            self._end.set()
            self._thread.join(timeout=5.0)
            self._write()

    def _run(self) -> None:
        while not self._end.wait(_SECONDS_BETWEEN_WRITES):
            self._write()

    def _write(self) -> None:
        latest = (*self._latest, self._warning, self._beside, self._peak_memory_bytes)
        if self._path is None or latest == self._written:
            return
        iteration, phase, moment, warning, beside, peak = latest
        values = {**self._fixed, "iteration": iteration, "phase": phase, "time": moment}
        if warning:
            values["warning"] = warning
        if beside:
            values["beside"] = beside
        if peak:
            values["peak_memory_bytes"] = peak
        # A full or slow disk must not end a training run because of its heartbeat.
        with contextlib.suppress(OSError):
            try:
                write_json(self._path, values)
            except OSError:
                self._overwrite(self._path, values)
            self._written = latest

    def _overwrite(self, path: Path, values: dict[str, object]) -> None:
        """Replace the content in place, without a new block of the disk, which may be full.

        One write of less than a page: readers see the old content or the new one.
        """
        text = json.dumps(values).encode()
        if len(text) > _PAGE_BYTES:
            text = json.dumps({**values, "warning": str(values["warning"])[:_WARNING_IF_FULL]}).encode()
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, text.ljust(os.fstat(descriptor).st_size), 0)
        finally:
            os.close(descriptor)
