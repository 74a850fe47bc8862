"""Files as arrays: their pages mapped into memory, or read piece by piece where a file system refuses to map.

A mapping of Python's mmap, and so of numpy's memmap, keeps a file descriptor until it ends (before Python 3.13 it
cannot be told not to), which a blend of a thousand files has not got: the usual limit is 1,024. mmap(2) itself needs
the descriptor for the call only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_FAILED = ctypes.c_void_p(-1).value
SHORT_RANGE = 64
"""Ranges of fewer numbers on average are gathered number by number, at 3 ns each, rather than copied one by one, at
0.2 us each (Python 3.11, one core of an EPYC)."""


class _Pages:
    """Pages of a file, for reading. They are let go of with the last array that looks into them."""

    def __init__(self, path: Path, size: int) -> None:
        """Map ``size`` bytes, at least 1, of ``path``.

        Raises:
            OSError: the file cannot be opened, or its file system or the limits of the process refuse a mapping.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        finally:
            os.close(descriptor)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        # How numpy is told of memory that somebody else owns; the array keeps this object alive.
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}
        # Not at the end of the process, which other threads may still be reading in; the pages end with it.
        weakref.finalize(self, libc.munmap, address, size).atexit = False


def map_file(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The whole content of ``path``, a multiple of ``dtype``'s size, as an array that cannot be written to.

    Holds no file descriptor. The array, and every view of it, stays valid for as long as somebody has it.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    size = path.stat().st_size
    # Zero bytes cannot be mapped.
    return np.asarray(_Pages(path, size)).view(dtype) if size else np.zeros(0, dtype)


class ArrayFile:
    """A file of numbers, of which ranges are copied out: from mapped pages where there can be any, else by reading."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Open ``path``, whose size is a multiple of ``dtype``'s.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._dtype = dtype
        self._length = path.stat().st_size // dtype.itemsize
        self._pages: npt.NDArray[Any] | None = None
        # Some parallel file systems refuse after some hundred mappings (EPERM), some know none at all (ENODEV).
        with suppress(OSError):
            self._pages = map_file(path, dtype)
        if self._pages is None:
            self.read_into(0, np.empty(min(1, self._length), dtype))

    def __len__(self) -> int:
        """How many numbers there are."""
        return self._length

    def read_into(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill ``out``, which may be of another type of integer, from position ``start`` on. Must lie within the file.

        Raises:
            OSError: the file cannot be read, or is shorter than it was when it was opened.
        """
        if self._pages is not None:
            out[...] = self._pages[start : start + len(out)]
            return
        with self._path.open("rb", buffering=0) as file:
            file.seek(start * self._dtype.itemsize)
            content = np.fromfile(file, self._dtype, len(out))
        if len(content) != len(out):
            raise OSError(f"{self._path}: ends before number {start + len(out):,}; it has become shorter")
        out[...] = content

    def read_ranges_into(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> None:
        """Fill ``out`` with ranges of the file, one after another, which are as long together and lie within it.

        Raises:
            OSError: as read_into.
        """
        if self._pages is None:
            place = 0
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self.read_into(start, out[place : place + length])
                place += length
        elif len(out) < SHORT_RANGE * len(starts):
            positions = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
            positions += np.arange(len(out))
            out[...] = self._pages.take(positions)
        elif len(starts):
            pages, stops = self._pages, starts + lengths
            ranges = [pages[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            np.concatenate(ranges, out=out, casting="unsafe")
