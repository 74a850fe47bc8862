"""Checksums of a checkpoint's files: CRC-32 (zlib) of each block of 4 MiB, and of metadata.json as a whole. Torch-free.

Blocks of the file, not tensors: the header is covered too, and a rank that reads a part of a tensor verifies the blocks
of this part alone. They are made beside the writing, because both libraries leave the interpreter's lock. zlib-ng uses
the processor's instruction for it (PCLMULQDQ) and is about five times as fast as zlib; the values are the same.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from typing_extensions import Self

from trainer.checkpoint.block_writes import EarlyWriter

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

BLOCK_BYTES = 4 << 20
METADATA_CHECKSUM = "checksum"
"""Key of metadata.json with the checksum of all other keys; written last."""

_BATCH_BLOCKS = 8
"""Blocks that one call writes, and that the other thread gets at once: on a machine with other load each thread waits
for a core whenever it is woken."""
_MOST_PENDING = 2
"""Batches that wait for their checksums. They keep the tensors alive that they are parts of."""
_READ_AHEAD = 4
"""Blocks that the disk reads while one is compared."""
_SAMPLED_EVERY = 16


class WrittenFile(NamedTuple):
    """A file that was written.

    Attributes:
        size: in bytes.
        checksums: of its blocks.
    """

    size: int
    checksums: list[int]


class ChecksumWriter:
    """Writes a file block by block, and computes the checksums of the blocks in another thread meanwhile.

    A context manager. The buffers must not change before ``close``.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Write to ``file``, which is empty, past its buffer."""
        self._file = EarlyWriter(file.fileno())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._pending: deque[Future[list[int]]] = deque()
        self._batch: list[list[memoryview]] = []
        self._block: list[memoryview] = []
        self._filled = 0
        self._size = 0
        self._checksums: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, a contiguous buffer.

        Raises:
            OSError: the disk is full, or writing fails.
        """
        view = memoryview(data).cast("B")
        self._size += len(view)
        while len(view):
            piece = view[: BLOCK_BYTES - self._filled]
            self._block.append(piece)
            self._filled += len(piece)
            if self._filled == BLOCK_BYTES:
                self._end_block()
            view = view[len(piece) :]

    def close(self) -> WrittenFile:
        """Write the last block, and wait for the checksums; the file stays open, and is not synced.

        Raises:
            OSError: the disk is full, or writing fails.
        """
        if self._block:
            self._end_block()
        self._end_batch()
        self._take(0)
        return WrittenFile(self._size, self._checksums)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def _end_block(self) -> None:
        self._batch.append(self._block)
        self._block, self._filled = [], 0
        if len(self._batch) == _BATCH_BLOCKS:
            self._end_batch()

    def _end_batch(self) -> None:
        self._pending.append(self._pool.submit(_checksums, self._batch))
        self._file.write([piece for block in self._batch for piece in block])
        self._batch = []
        self._take(_MOST_PENDING)

    def _take(self, most: int) -> None:
        while len(self._pending) > most:
            self._checksums += self._pending.popleft().result()


def _checksums(blocks: Iterable[Iterable[memoryview]]) -> list[int]:
    found = []
    for block in blocks:
        value = 0
        for piece in block:
            value = crc32(piece, value)
        found.append(value)
    return found


def checksums_of(data: memoryview) -> list[int]:
    """Checksums of the blocks of ``data``, contiguous bytes."""
    return [crc32(data[first : first + BLOCK_BYTES]) for first in range(0, len(data), BLOCK_BYTES)]


class VerifiedFile:
    """A file whose blocks are compared with their checksums, each once, before their bytes are used.

    Reads with pread(2): an error of the disk is an OSError here, while a mapped page would end the process (SIGBUS).
    """

    def __init__(self, path: Path, checksums: Sequence[int]) -> None:
        """Open ``path``.

        Raises:
            OSError: the file cannot be opened.
        """
        self._checksums = checksums
        self._is_sound = bytearray(len(checksums))
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = bytearray(BLOCK_BYTES)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def find_damage(self, start: int, stop: int) -> str | None:
        """The damage in the blocks that have the bytes from ``start`` to ``stop``; None without.

        Raises:
            OSError: the disk cannot read them.
        """
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if block >= len(self._checksums):
                return f"is shorter than byte {stop:,}"
            if self._is_sound[block]:
                continue
            first = block * BLOCK_BYTES
            view = memoryview(self._buffer)[: self._read(first)]
            if crc32(view) != self._checksums[block]:
                return f"has altered bytes between {first:,} and {first + len(view):,}"
            self._is_sound[block] = True
        return None

    def find_any_damage(self, blocks: Iterable[int] | None = None) -> str | None:
        """The damage in the given blocks, by default all; None without.

        Raises:
            OSError: the disk cannot read them.
        """
        for block in range(len(self._checksums)) if blocks is None else blocks:
            damage = self.find_damage(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            if damage is not None:
                return damage
        return None

    def find_damage_on_disk(self, blocks: Sequence[int]) -> str | None:
        """Like find_any_damage, but of what the disk returns: the system drops its copies of the blocks first.

        Raises:
            OSError: the disk cannot read them.
        """
        for block in blocks:
            self._advise(block, os.POSIX_FADV_DONTNEED)
        for block in blocks[:_READ_AHEAD]:
            self._advise(block, os.POSIX_FADV_WILLNEED)
        for place, block in enumerate(blocks):
            for later in blocks[place + _READ_AHEAD : place + _READ_AHEAD + 1]:
                self._advise(later, os.POSIX_FADV_WILLNEED)
            damage = self.find_any_damage((block,))
            if damage is not None:
                return damage
        return None

    def header(self) -> Mapping[str, Any]:
        """The header of a safetensors file; byte 0 of the data is at byte ``header_bytes`` of the file.

        Raises:
            OSError: the disk cannot read it.
            ValueError: it is not such a header.
        """
        size = self.header_bytes - 8
        values = json.loads(os.pread(self._descriptor, size, 8))
        if not isinstance(values, dict):
            raise ValueError("the header is not an object")
        return values

    @property
    def header_bytes(self) -> int:
        """Bytes before the data: the size of the header's text, in 8 bytes, and the text."""
        return 8 + int.from_bytes(os.pread(self._descriptor, 8, 0), "little")

    def _advise(self, block: int, advice: int) -> None:
        # Advice alone (posix_fadvise(2)): without it the bytes come from memory, or later.
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, block * BLOCK_BYTES, BLOCK_BYTES, advice)

    def _read(self, first: int) -> int:
        """Read a block into the buffer; returns its size, less than a block at the end of the file."""
        size = 0
        while size < BLOCK_BYTES:
            count = os.preadv(self._descriptor, [memoryview(self._buffer)[size:]], first + size)
            if count == 0:
                break
            size += count
        return size


def checksum_file(path: Path) -> list[int]:
    """Checksums of a file that another writer has made.

    Raises:
        OSError: the file cannot be read.
    """
    found = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            found.append(crc32(block))
    return found


def sampled_blocks(count: int, turn: int) -> list[int]:
    """Blocks to read back after a save: the first, the last, and every 16th, others at each ``turn``."""
    ends = {0, count - 1} if count else set()
    return sorted(ends | set(range(turn % _SAMPLED_EVERY, count, _SAMPLED_EVERY)))


def checksum_of_metadata(values: Mapping[str, Any]) -> int:
    """Checksum of all keys of metadata.json but its own. JSON that was read and JSON that will be written agree."""
    return crc32(json.dumps({key: values[key] for key in values if key != METADATA_CHECKSUM}).encode())


def is_metadata_sound(values: Mapping[str, Any]) -> bool:
    """True if metadata.json has its own checksum, or comes from a release without checksums."""
    if METADATA_CHECKSUM not in values:
        return "checksums" not in values
    return bool(values[METADATA_CHECKSUM] == checksum_of_metadata(values))
