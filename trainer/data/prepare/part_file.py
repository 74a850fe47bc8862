"""Part file: the tokens of one chunk on disk, complete or absent.

"LLMCTLS2" | blocks | footer, JSON | u64 length of the footer | u32 CRC-32 of all before | "LLMCTLS2"
block: u32 key | u64 T tokens | u64 S sequences | u64 D documents | tokens[T] | i4[S] lengths | i8[D] ends
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import Self

from trainer.data.errors import DataError
from trainer.data.prepare.encoding import Block

_MAGIC = b"LLMCTLS2"
_BLOCK = struct.Struct("<IQQQ")
_LENGTH = struct.Struct("<Q")
_TAIL = struct.Struct("<QI8s")
_BUFFER = 1 << 20


class DamagedPartFileError(DataError):
    """A part file fails its checksum; ``path`` names the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: is damaged")
        self.path = path


@dataclass
class Footer:
    """Summary of a chunk.

    Attributes:
        documents: number of documents that became tokens, including empty ones.
        sequences: number of sequences of all keys together.
        text_bytes: UTF-8 bytes of the text of each key.
        largest: largest token of each key; -1 without tokens.
        lines: number of lines of each span.
        bad: number of documents that were skipped.
        first_bad: first skipped documents: span number, line in the span, reason.
    """

    documents: int = 0
    sequences: int = 0
    text_bytes: list[int] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    bad: int = 0
    first_bad: list[tuple[int, int | None, str]] = field(default_factory=list)


class PartFileWriter:
    """Writes a part file beside ``path``; renames it when complete and flushed to disk.

    Raises:
        OSError: the file cannot be written; the partial file is removed.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], keys: int) -> None:
        self.footer = Footer(text_bytes=[0] * keys, largest=[-1] * keys)
        self._path = path
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self._dtype = dtype
        self._file = self._partial.open("wb", buffering=_BUFFER)
        self._crc = 0
        self._put(_MAGIC)

    def _put(self, content: bytes | memoryview) -> None:
        self._crc = zlib.crc32(content, self._crc)
        self._file.write(content)

    def add(self, key: int, block: Block) -> None:
        """Append a block of key number ``key``."""
        tokens = block.tokens.astype(self._dtype)
        self._put(_BLOCK.pack(key, len(tokens), len(block.lengths), len(block.ends)))
        self._put(tokens.data.cast("B") if len(tokens) else b"")
        self._put(block.lengths.astype("<i4").tobytes())
        self._put(block.ends.astype("<i8").tobytes())
        self.footer.sequences += len(block.lengths)
        self.footer.text_bytes[key] += block.text_bytes
        if len(tokens):
            self.footer.largest[key] = max(self.footer.largest[key], int(tokens.max()))

    def finish(self) -> None:
        """Write footer and checksum, and rename the part file to its final name."""
        footer = json.dumps(asdict(self.footer)).encode()
        self._put(footer)
        crc = zlib.crc32(_LENGTH.pack(len(footer)), self._crc)
        self._file.write(_TAIL.pack(len(footer), crc, _MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a full disk, close() tries to write the buffer again and fails, but closes the file all the same.
        with suppress(OSError):
            self._file.close()
        self._partial.unlink(missing_ok=True)


@contextmanager
def open_part_file(path: Path, dtype: np.dtype[Any]) -> Iterator[tuple[Footer, Iterator[tuple[int, Block]]]]:
    """Open a part file: footer, and iterator of (key number, block) in written order.

    The checksum of the whole file is verified first, which takes one additional read.

    Raises:
        DamagedPartFileError: the checksum does not match.
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=_BUFFER) as file:
        end, length = _check(path, file)
        file.seek(end)
        footer = Footer(**json.loads(file.read(length)))
        yield footer, _blocks(file, end, dtype)


def _read_tail(path: Path, file: BinaryIO) -> tuple[int, int, int]:
    """Return the end of the blocks, the footer's length, and the checksum."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - _TAIL.size))
    tail = file.read()
    length, crc, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, 0, b"")
    end = size - _TAIL.size - length
    if magic != _MAGIC or end < len(_MAGIC):
        raise DamagedPartFileError(path)
    return end, length, crc


def _check(path: Path, file: BinaryIO) -> tuple[int, int]:
    """Verify the checksum; return the end of the blocks and the footer's length."""
    end, length, expected = _read_tail(path, file)
    file.seek(0)
    crc, left = 0, end + length
    while left and (content := file.read(min(_BUFFER, left))):
        crc = zlib.crc32(content, crc)
        left -= len(content)
    if left or zlib.crc32(_LENGTH.pack(length), crc) != expected:
        raise DamagedPartFileError(path)
    return end, length


def _blocks(file: BinaryIO, end: int, dtype: np.dtype[Any]) -> Iterator[tuple[int, Block]]:
    file.seek(len(_MAGIC))
    while file.tell() < end:
        key, tokens, sequences, documents = _BLOCK.unpack(file.read(_BLOCK.size))
        yield (
            key,
            Block(
                np.frombuffer(file.read(tokens * dtype.itemsize), dtype),
                np.frombuffer(file.read(4 * sequences), "<i4").astype(np.int64),
                np.frombuffer(file.read(8 * documents), "<i8"),
                0,
            ),
        )
