"""Redirection of each rank's output to its own log, before torch is imported.

Torch-free.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import sys
import threading
from pathlib import Path

_POLL_SECONDS = 0.1
_BLOCK = 1 << 16


def redirect_output(log: Path, *, also_console: bool) -> ConsoleCopy | None:
    """Redirect file descriptors 1 and 2 to ``log``, including output of C libraries.

    With ``also_console`` a thread copies new output from the file to the former stdout. Every line is in the file as
    soon as it is written, whatever kills the process, and no copying process can outlive this one.

    Raises:
        OSError: the log cannot be opened.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    console = os.dup(1)
    start = os.fstat(descriptor).st_size
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the locale cannot print must not end a run: compute nodes often have LANG unset.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True)
    faulthandler.enable(file=2)
    if also_console:
        copy = ConsoleCopy(log, start, console)
        copy.start()
        return copy
    os.close(console)
    return None


class ConsoleCopy:
    """Copies output appended to a file to a file descriptor, until the process ends."""

    def __init__(self, log: Path, start: int, console: int) -> None:
        """Prepare to copy ``log`` from byte ``start`` to the descriptor ``console``."""
        self._log = os.open(log, os.O_RDONLY)
        self._offset = start
        self._console = console
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console copy", daemon=True)

    def start(self) -> None:
        """Start copying, and register ``finish`` for the end of the interpreter."""
        self._thread.start()
        atexit.register(self.finish)

    def finish(self) -> None:
        """Copy the remaining output and stop."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._end.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        # The terminal or the reader of a pipe may have closed; training continues without it.
        with contextlib.suppress(OSError):
            while not self._end.wait(_POLL_SECONDS):
                self._copy()
            self._copy()

    def _copy(self) -> None:
        while block := os.pread(self._log, _BLOCK, self._offset):
            self._offset += len(block)
            while block:
                block = block[os.write(self._console, block) :]
