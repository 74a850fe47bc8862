"""Compressed input files: their bytes, decompressed, and the errors of reading them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from trainer.data.errors import DataError

Packing = Literal["", "gz", "zst", "bz2", "xz"]
PACKINGS: dict[str, Packing] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}
"""Ending of a compressed file -> its compression."""
_BUFFER = 1 << 20
_PACKED = 4096
"""Bytes of a compressed file to decompress at once: few, because a byte may expand to thousands."""


def packing_of(path: str) -> Packing:
    """Return the compression of a file of this name; "" without compression."""
    return PACKINGS.get(Path(path).suffix.lower(), "")


class _Unpacked(io.BufferedReader):
    """A decompressed stream that also closes its file."""

    def __init__(self, stream: io.RawIOBase, file: BinaryIO) -> None:
        super().__init__(stream, _BUFFER)
        self._file = file

    @property
    def position(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        super().close()
        self._file.close()


class _Members(io.RawIOBase):
    """The members of a compressed file, one after another, up to the file's end.

    The streams of bz2 and lzma stop without error at unknown bytes after a member, although a damaged member may
    follow, and the stream of zstandard does not report a truncated last member.

    Args:
        file: the compressed file.
        begin: creates the decompressor of the next member.
        padding: bytes that may stand between members.
    """

    def __init__(self, file: BinaryIO, begin: Callable[[], Any], padding: bytes = b"") -> None:
        self._file = file
        self._begin = begin
        self._padding = padding
        self._member: Any = None
        self._packed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            # The decompressors of bz2 and lzma hold back unrequested output: little input may be gigabytes of text.
            if not self._packed and getattr(self._member, "needs_input", True):
                self._packed = self._file.read(_PACKED)
                if not self._packed:
                    if self._member is not None:
                        raise EOFError("the file ends within compressed data")
                    return 0
            if self._member is None:
                self._packed = self._packed.lstrip(self._padding)
                if not self._packed:
                    continue
                self._member = self._begin()
            most = (_BUFFER,) if hasattr(self._member, "needs_input") else ()
            self._content = memoryview(self._member.decompress(self._packed, *most))
            self._packed = b""
            if self._member.eof:
                self._packed = self._member.unused_data
                self._member = None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def open_bytes(path: str) -> BinaryIO:
    """Open ``path`` for reading, decompressed, with a buffer of a megabyte.

    Raises:
        DataError: the file is compressed by zstd, and the package zstandard is not installed.
        OSError: the file cannot be opened.
    """
    packing = packing_of(path)
    file = Path(path).open("rb", buffering=_BUFFER)  # noqa: SIM115 (closed with the returned stream)
    if packing == "":
        return file
    try:
        return cast(BinaryIO, _Unpacked(_decompressor(path, packing, file), file))
    except BaseException:
        file.close()
        raise


def bytes_read(stream: BinaryIO) -> int:
    """Return the bytes of its file that an ``open_bytes`` stream has read, approximately.

    The buffer makes the number a little too large.
    """
    return stream.position if isinstance(stream, _Unpacked) else stream.tell()


def _decompressor(path: str, packing: Packing, file: BinaryIO) -> io.RawIOBase:
    if packing == "gz":
        return cast(io.RawIOBase, gzip.GzipFile(fileobj=file, mode="rb"))
    if packing == "bz2":
        return _Members(file, bz2.BZ2Decompressor)
    if packing == "xz":
        # The .xz File Format 1.2.1, section 2.2: stream padding.
        return _Members(file, lzma.LZMADecompressor, padding=b"\0")
    try:
        import zstandard
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: needs the package zstandard; install it (pip install zstandard), or decompress the file (zstd -d)"
        ) from None
    # Window of 2 GiB: the maximum that `zstd --long=31` writes.
    return _Members(file, lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj())


def reading_errors() -> tuple[type[Exception], ...]:
    """Return the errors that reading raises, by the system or by decompressors."""
    known: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        import zstandard
    except ModuleNotFoundError:
        return known
    return (*known, zstandard.ZstdError)


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for the user for one of ``reading_errors``."""
    packing = packing_of(path)
    is_content = bool(packing) and getattr(error, "errno", None) is None
    remedy = f"; it is damaged, truncated, or not .{packing}: get it again, or rename it" if is_content else ""
    return DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{remedy}")
