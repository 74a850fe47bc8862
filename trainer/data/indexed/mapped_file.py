"""Files as arrays: mapped into memory, or read if mapping fails.

A mapping of Python's mmap, and so of numpy's memmap, keeps a file descriptor open (before Python 3.13 always). A blend
of a thousand files would exceed the usual limit of 1,024 descriptors. mmap(2) itself needs the descriptor only during
the call.
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
"""Ranges of fewer numbers on average are gathered by index, 3 ns per number, instead of copied range by range, 0.2 us
per range (Python 3.11, one core of an EPYC)."""


class _Pages:
    """Read-only mapping of a file, unmapped with the last array that uses it."""

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
        # numpy's protocol for foreign memory; the array keeps this object alive.
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}
        # Do not unmap at exit, when other threads may still read; the kernel unmaps the pages.
        weakref.finalize(self, libc.munmap, address, size).atexit = False


def map_file(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Map the whole content of ``path`` as a read-only array of ``dtype``.

    The size of the file must be a multiple of the dtype's. The array holds no file descriptor; the array and its views
    stay valid as long as they exist.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    size = path.stat().st_size
    # An empty file cannot be mapped.
    return np.asarray(_Pages(path, size)).view(dtype) if size else np.zeros(0, dtype)


class ArrayFile:
    """A file of numbers, mapped, or read if mapping fails."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Open ``path``, whose size must be a multiple of ``dtype``'s.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._dtype = dtype
        self._length = path.stat().st_size // dtype.itemsize
        self._pages: npt.NDArray[Any] | None = None
        # Some parallel file systems refuse after some hundred mappings (EPERM), some support none (ENODEV).
        with suppress(OSError):
            self._pages = map_file(path, dtype)
        if self._pages is None:
            self.read_into(0, np.empty(min(1, self._length), dtype))

    def __len__(self) -> int:
        """Number of numbers in the file."""
        return self._length

    def read_into(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill ``out``, of any integer dtype, from position ``start``.

        The range must be within the file.

        Raises:
            OSError: the file cannot be read, or has become shorter since it was opened.
        """
        if self._pages is not None:
            out[...] = self._pages[start : start + len(out)]
            return
        with self._path.open("rb", buffering=0) as file:
            file.seek(start * self._dtype.itemsize)
            content = np.fromfile(file, self._dtype, len(out))
        if len(content) != len(out):
            raise OSError(f"{self._path}: ends before number {start + len(out):,}; the file has become shorter")
        out[...] = content

    def read_ranges_into(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> None:
        """Fill ``out`` with concatenated ranges of the file, of the same total length.

        The ranges must be within the file.

        Raises:
            OSError: the file cannot be read, or has become shorter since it was opened.
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
