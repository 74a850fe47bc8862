"""What an indexed dataset is made of while it grows: tokens, sequence lengths and document ends, each in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import CHUNK, DTYPES, HEADER, MAGIC, VERSION

LONGEST_SEQUENCE = (1 << 31) - 1
_BLOCK = 1 << 20


class PartFiles(NamedTuple):
    """Open to read and to write, each at its end."""

    tokens: BinaryIO
    lengths: BinaryIO
    documents: BinaryIO


class PairParts:
    """The tables in ``files``, empty or as they were left.

    Args:
        name: of the pair's .bin, for messages.
        files: of the tables; int32 [S] of lengths, and int64 [D + 1] of ends, of which the first is 0.
        code: of the tokens' dtype.
    """

    def __init__(self, name: Path, files: PartFiles, code: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        self._name = name
        self._files = files
        self._code = code
        self._digest = hashlib.sha256()
        if not files.documents.tell():
            files.documents.write(np.zeros(1, "<i8").tobytes())
        self.tokens = files.tokens.tell() // self.dtype.itemsize
        self.sequences = files.lengths.tell() // 4
        self.documents = files.documents.tell() // 8 - 1
        files.tokens.seek(0)
        while block := files.tokens.read(_BLOCK):
            self._digest.update(block)

    def append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Add whole documents, as of PairWriter.

        Raises:
            DataError: a sequence is longer than an index can say.
            OSError: the files cannot be written, as when the disk is full.
        """
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            raise DataError(
                f"{self._name}: a sequence of {int(lengths.max()):,} tokens; an index has 31 bits for a length, so "
                "divide the document"
            )
        content = np.ascontiguousarray(tokens, self.dtype)
        self._digest.update(content.data)
        self._files.tokens.write(content.data)
        self._files.lengths.write(lengths.astype("<i4").tobytes())
        self._files.documents.write((ends.astype(np.int64) + self.sequences).astype("<i8").tobytes())
        self.tokens += content.size
        self.sequences += len(lengths)
        self.documents += len(ends)

    @property
    def tokens_sha256(self) -> str:
        """Of all tokens, in hexadecimal."""
        return self._digest.hexdigest()

    def write_index(self, index: BinaryIO) -> str:
        """Write the .idx; gives its SHA-256 in hexadecimal.

        Raises:
            OSError: it cannot be written, as when the disk is full.
        """
        digest = hashlib.sha256()

        def put(content: bytes) -> None:
            digest.update(content)
            index.write(content)

        put(HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1))
        for block in _blocks(self._files.lengths):
            put(block)
        position = 0
        for block in _blocks(self._files.lengths):
            sizes = np.frombuffer(block, "<i4").astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            put((ends - sizes).astype("<i8").tobytes())
            position = int(ends[-1])
        for block in _blocks(self._files.documents):
            put(block)
        return digest.hexdigest()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    return iter(lambda: file.read(8 * CHUNK), b"")
