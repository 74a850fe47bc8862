"""Writes of many buffers with few system calls, and an early start of the disk. Torch-free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_MOST_PIECES = 1024
"""Most buffers of one writev(2) on Linux (IOV_MAX)."""
_SYNC_FILE_RANGE_WRITE = 2


class EarlyWriter:
    """Appends to a file, and lets the disk write meanwhile, so that little is left for fsync(2).

    The system would keep a GB in memory until that call, during which nobody computes or copies anything.
    """

    def __init__(self, descriptor: int) -> None:
        """Write at the end of an empty file that is open as ``descriptor``."""
        self._descriptor = descriptor
        self._written = 0
        # Linux alone has it; fsync(2) tells its errors.
        start = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if start is not None:
            start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        self._start = start

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Append buffers of bytes, one after another, and let the disk start with them. Best with many MB at once.

        Raises:
            OSError: the disk is full, or writing fails.
        """
        began = self._written
        for first in range(0, len(pieces), _MOST_PIECES):
            self._write_some(list(pieces[first : first + _MOST_PIECES]))
        if self._start is not None:
            self._start(self._descriptor, began, self._written - began, _SYNC_FILE_RANGE_WRITE)

    def _write_some(self, left: list[memoryview]) -> None:
        while left:
            # Fewer bytes than asked for on a disk that is nearly full: the next call has the error.
            count = os.writev(self._descriptor, left)
            self._written += count
            whole = 0
            while whole < len(left) and count >= len(left[whole]):
                count -= len(left[whole])
                whole += 1
            left = left[whole:]
            if count:
                left[0] = left[0][count:]
