"""Files of a growing indexed dataset: tokens, sequence lengths and document ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.config.formats.indexed_data import DTYPES, HEADER, MAGIC, VERSION
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import CHUNK

LONGEST_SEQUENCE = (1 << 31) - 1
_BLOCK = 1 << 20


class TableFiles(NamedTuple):
    """Open files for reading and writing, each positioned at its end."""

    tokens: BinaryIO
    lengths: BinaryIO
    documents: BinaryIO


class IndexedDatasetTables:
    """Tables of an indexed dataset in ``files``, empty or continued.

    Args:
        name: path of the dataset's .bin, for messages.
        files: files of the tables: tokens, int32 [S] lengths, int64 [D + 1] document ends, of which the first is 0.
        code: code of the tokens' dtype.
    """

    def __init__(self, name: Path, files: TableFiles, code: int) -> None:
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
        """Add whole documents; arguments as in IndexedDatasetWriter.append.

        Raises:
            DataError: a sequence is longer than the index format allows.
            OSError: the files cannot be written, for example because the disk is full.
        """
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            raise DataError(
                f"{self._name}: a sequence has {int(lengths.max()):,} tokens, but the index format allows at most "
                f"{LONGEST_SEQUENCE:,}; divide the document"
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
        """SHA-256 of all tokens, in hexadecimal."""
        return self._digest.hexdigest()

    def write_index(self, index: BinaryIO) -> str:
        """Write the .idx and return its SHA-256 in hexadecimal.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
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
