"""Reader of Megatron-LM's indexed datasets: tokens in ``<prefix>.bin``, lengths in ``<prefix>.idx``.

trainer.data.indexed.index_format describes the format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from trainer.config.formats.indexed_data import (
    HEADER,
    FormatError,
    IndexHeader,
    check_listed_size,
    check_token_size,
    read_header,
)
from trainer.data.errors import DataError
from trainer.data.indexed.checksum_cache import ChecksumCache
from trainer.data.indexed.index_format import CHUNK, files_of
from trainer.data.indexed.mapped_file import ArrayFile, map_file

MARKS = 5
"""Number of places of a dataset whose tokens are compared, from the first to the last. Another file differs in all of
them, and the check of thousands of files takes a moment."""
MARK_TOKENS = 64
"""Number of tokens compared at each place."""


class IndexedDataset:
    """An indexed dataset, memory-mapped and checked when opened. Holds no file descriptor.

    The token stream is contiguous, so that a range of sequences is one slice of the stream. Reading methods return
    copies. Views of the tables stay valid after ``close``.
    """

    def __init__(self, prefix: Path, checksums: ChecksumCache | None = None) -> None:
        """Open and check the dataset of ``prefix`` (a path without .bin or .idx).

        Args:
            prefix: prefix of the two files.
            checksums: cache of the check that a large index is complete, which reads the index; None: no cache.

        Raises:
            DataError: a file is missing, unreadable or not an index, or the two files do not belong together.
        """
        self.prefix = prefix
        self._bin, self._idx = files_of(prefix)
        self._checksums = checksums
        missing = [str(path) for path in (self._bin, self._idx) if not path.is_file()]
        if missing:
            raise DataError(
                f"{' and '.join(missing)}: no such file; a data path is the common prefix of {self._bin.name} and "
                f"{self._idx.name}, which `llmctl data prepare` writes"
            )
        try:
            self._status = self._idx.stat()
            self._open()
            self.remembered("whole", self._check_tables)
            self._check_size()
        except FormatError as error:
            raise DataError(str(error)) from None
        except OSError as error:
            raise DataError(f"{error.filename or prefix}: cannot be read: {error.strerror or error}") from None

    def _open(self) -> None:
        header = self._read_header()
        dtype, size = np.dtype(header.dtype), self._bin.stat().st_size
        check_token_size(self._bin, size, dtype.itemsize)
        self.dtype = dtype
        self._tokens: ArrayFile | None = ArrayFile(self._bin, dtype)
        self.token_count = size // dtype.itemsize
        """Number of tokens in all sequences."""
        self.document_count = header.entries - 1
        """Number of documents, including empty ones."""
        try:
            index = map_file(self._idx, np.dtype("u1"))
        except OSError:
            # Some file systems do not support mapping: see ArrayFile.
            index = np.fromfile(self._idx, "u1")
        first, second = header.pointers, header.documents
        self.sequence_lengths: npt.NDArray[np.int32] = index[HEADER.size : first].view("<i4")
        self._pointers: npt.NDArray[np.int64] = index[first:second].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = index[second : second + 8 * header.entries].view("<i8")

    def _read_header(self) -> IndexHeader:
        size = self._idx.stat().st_size
        with self._idx.open("rb") as file:
            return read_header(self._idx, file.read(HEADER.size), size)

    def remembered(self, what: str, work: Callable[[], bytes]) -> bytes:
        """Result of ``work``, from the cache if present; depends only on the tables."""
        if self._checksums is None or self._status.st_size < self._checksums.MIN_BYTES:
            return work()
        found = self._checksums.recall(self._idx, what)
        if found is None:
            found = work()
            self._checksums.keep(self._idx, self._status, what, found)
        return found

    def lengths_digest(self) -> str:
        """Digest of all sequence lengths: 0.5 s for 10^8 of them, without reading the tokens."""

        def compute() -> bytes:
            return hashlib.blake2b(np.ascontiguousarray(self.sequence_lengths, "<i4").data, digest_size=12).digest()

        return self.remembered("digest of lengths", compute).hex()

    def marks_digest(self) -> str:
        """Digest of a few tokens, which detects another file with equal lengths."""
        length = min(MARK_TOKENS, self.token_count)
        last = self.token_count - length
        starts = np.array([last * number // (MARKS - 1) for number in range(MARKS)])
        marks = np.empty(MARKS * length, "<i8")
        self.read_ranges_into(starts, np.full(MARKS, length), marks)
        return hashlib.blake2b(marks.data, digest_size=8).hexdigest()

    def _check_tables(self) -> bytes:
        self._check_offsets()
        self._check_documents()
        return b""

    def _check_offsets(self) -> None:
        position = 0
        for start in range(0, len(self.sequence_lengths), CHUNK):
            lengths = self.sequence_lengths[start : start + CHUNK]
            sizes = lengths.astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            if lengths.min() < 0 or not np.array_equal(ends - sizes, self._pointers[start : start + CHUNK]):
                raise DataError(
                    f"{self._idx}: the byte offsets do not match the sequence lengths; prepare the data again"
                )
            position = int(ends[-1])

    def _check_size(self) -> None:
        position = 0
        if len(self.sequence_lengths):
            position = int(self._pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        size = self.token_count * self.dtype.itemsize
        check_listed_size(self._bin, self._idx.name, size, position)

    def _check_documents(self) -> None:
        entries = self.document_indices
        whole = len(entries) > 0 and entries[0] == 0 and entries[-1] == len(self)
        # Each block begins with the last entry of the previous block.
        blocks = (entries[start : start + CHUNK + 1] for start in range(0, len(entries), CHUNK))
        if not whole or any(np.any(block[1:] < block[:-1]) for block in blocks):
            raise DataError(
                f"{self._idx}: the document entries do not ascend from 0 to {len(self):,}; prepare the data again"
            )

    def __len__(self) -> int:
        """Number of sequences; for GPT data a sequence is a non-empty document."""
        return len(self.sequence_lengths)

    def first_token(self, sequence: int) -> int:
        """Start of ``sequence`` in the token stream; for ``len(self)`` the length of the stream."""
        return self.token_count if sequence == len(self) else int(self._pointers[sequence]) // self.dtype.itemsize

    def first_tokens(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Start of each of ``sequences`` in the token stream; see first_token."""
        try:
            return self._pointers[sequences] // self.dtype.itemsize
        except IndexError:
            found = np.full(len(sequences), self.token_count, np.int64)
            inner = sequences < len(self)
            found[inner] = self._pointers[sequences[inner]] // self.dtype.itemsize
            return found

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read tokens ``start`` to ``stop`` (exclusive) of the stream in their stored dtype.

        Raises:
            IndexError: the range exceeds the stream.
            ValueError: the dataset is closed.
        """
        out = np.empty(max(0, stop - start), self.dtype)
        self.read_into(start, stop, out)
        return out

    def read_into(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Read tokens ``start`` to ``stop`` (exclusive) into ``out``, of any integer dtype.

        Raises:
            IndexError: the range exceeds the stream.
            ValueError: the dataset is closed.
        """
        tokens = self._open_tokens()
        if not 0 <= start <= stop <= len(tokens):
            raise IndexError(f"{self._bin}: tokens {start} to {stop} of {len(tokens)}")
        tokens.read_into(start, out)

    def read_ranges_into(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> None:
        """Read concatenated ranges of the stream into ``out``, of any integer dtype.

        ``out`` has the total length. The ranges are not checked: they must come from the index of this dataset.

        Raises:
            ValueError: the dataset is closed.
        """
        self._open_tokens().read_ranges_into(starts, lengths, out)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """Read the tokens of one sequence in their stored dtype."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self._bin}: sequence {sequence} of {len(self)}")
        start = self.first_token(sequence)
        return self.read(start, start + int(self.sequence_lengths[sequence]))

    def _open_tokens(self) -> ArrayFile:
        if self._tokens is None:
            raise ValueError(f"{self._bin}: is closed")
        return self._tokens

    def close(self) -> None:
        """Close the files; reading afterwards raises.

        The mappings end with the last view of them.
        """
        self._tokens = None
        self.sequence_lengths = np.zeros(0, np.int32)
        self._pointers = np.zeros(0, np.int64)
        self.document_indices = np.zeros(1, np.int64)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path, ChecksumCache | None]]:
        """Pickle only the prefix and the cache; another process opens the files itself."""
        return IndexedDataset, (self.prefix.absolute(), self._checksums)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
