"""Megatron-LM's indexed dataset, bit for bit: tokens in ``<prefix>.bin``, lengths in ``<prefix>.idx``.

The format stands in trainer.data.indexed.index_format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from trainer.data.errors import DataError
from trainer.data.indexed.checksum_cache import KnownFiles
from trainer.data.indexed.index_format import CHUNK, DTYPES, FLOATS, HEADER, MAGIC, VERSION, files_of
from trainer.data.indexed.mapped_file import ArrayFile, map_file


class IndexedDataset:
    """A .bin/.idx pair, mapped into memory and checked when it is opened. Holds no file descriptor.

    The token stream is contiguous, so that a range of sequences is one slice of it. What a reading method returned is
    the caller's own copy; the tables stay valid after ``close`` for whoever still has them.
    """

    def __init__(self, prefix: Path, known: KnownFiles | None = None) -> None:
        """Open and check the pair of ``prefix`` (a path without .bin or .idx).

        Args:
            prefix: of the two files.
            known: where it is kept that a large index was found whole, so that it is read once; None: nowhere.

        Raises:
            DataError: a file is missing or cannot be read, is no index, or the two do not belong together.
        """
        self.prefix = prefix
        self._bin, self._idx = files_of(prefix)
        self._known = known
        missing = [str(path) for path in (self._bin, self._idx) if not path.is_file()]
        if missing:
            raise DataError(
                f"{' and '.join(missing)}: no such file; a data path is the common start of {self._bin.name} and "
                f"{self._idx.name}, as `llmctl data prepare` writes them"
            )
        try:
            self._status = self._idx.stat()
            self._open()
        except OSError as error:
            raise DataError(f"{error.filename or prefix}: cannot be read: {error.strerror or error}") from None
        self.remembered("whole", self._check_tables)
        self._check_size()

    def _open(self) -> None:
        dtype, sequences, documents = self._read_header()
        size = self._bin.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"{self._bin}: its {size:,} bytes are not whole tokens of {dtype.itemsize} bytes; it is cut off or "
                "belongs to other data, prepare the data again"
            )
        self.dtype = dtype
        self._tokens: ArrayFile | None = ArrayFile(self._bin, dtype)
        try:
            index = map_file(self._idx, np.dtype("u1"))
        except OSError:
            # See ArrayFile for file systems that do not map.
            index = np.fromfile(self._idx, "u1")
        first, second = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
        self.sequence_lengths: npt.NDArray[np.int32] = index[HEADER.size : first].view("<i4")
        self._pointers: npt.NDArray[np.int64] = index[first:second].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = index[second : second + 8 * documents].view("<i8")

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        size = self._idx.stat().st_size
        with self._idx.open("rb") as file:
            header = file.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC:
            raise DataError(f"{self._idx}: is not a Megatron-LM index (it starts with {header[:9]!r})")
        if len(header) < HEADER.size:
            raise DataError(f"{self._idx}: is cut off within its header, at {size} bytes; prepare the data again")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"{self._idx}: is index version {version}; only version {VERSION} can be read")
        if code not in DTYPES:
            what = f"{FLOATS[code]} (dtype code {code})" if code in FLOATS else f"dtype code {code}"
            raise DataError(f"{self._idx}: has {what}, which is no integer token (known: {sorted(DTYPES)})")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if sequences and size == expected + sequences:
            raise DataError(
                f"{self._idx}: has a mode for each of its {sequences:,} sequences, as Megatron-LM's multimodal data "
                "has; only text can be read"
            )
        if size != expected:
            raise DataError(
                f"{self._idx}: has {size:,} bytes where {sequences:,} sequences and {documents:,} document entries "
                f"take {expected:,}; it is damaged or cut off, prepare the data again"
            )
        return np.dtype(DTYPES[code]), sequences, documents

    def remembered(self, what: str, work: Callable[[], bytes]) -> bytes:
        """What ``work`` gives, which depends on nothing but the tables; not worked out again where it is known."""
        found = None if self._known is None else self._known.recall(self._idx, what)
        if found is None:
            found = work()
            if self._known is not None:
                self._known.keep(self._idx, self._status, what, found)
        return found

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
                raise DataError(f"{self._idx}: its offsets do not follow from its lengths; prepare the data again")
            position = int(ends[-1])

    def _check_size(self) -> None:
        position = 0
        if len(self.sequence_lengths):
            position = int(self._pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        size = self.token_count * self.dtype.itemsize
        if size != position:
            raise DataError(
                f"{self._bin}: has {size:,} bytes where {self._idx.name} lists {position:,}; one of the two is cut off "
                "or belongs to other data, prepare the data again"
            )

    def _check_documents(self) -> None:
        entries = self.document_indices
        whole = len(entries) > 0 and entries[0] == 0 and entries[-1] == len(self)
        # Each piece begins with the last entry of the one before.
        pieces = (entries[start : start + CHUNK + 1] for start in range(0, len(entries), CHUNK))
        if not whole or any(np.any(piece[1:] < piece[:-1]) for piece in pieces):
            raise DataError(f"{self._idx}: its document entries do not run from 0 to {len(self):,}; prepare it again")

    def __len__(self) -> int:
        """Number of sequences; for GPT data a sequence is a document that is not empty."""
        return len(self.sequence_lengths)

    @property
    def document_count(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_indices) - 1

    @property
    def token_count(self) -> int:
        """Number of tokens in all sequences."""
        return len(self._open_tokens())

    def first_token(self, sequence: int) -> int:
        """Position in the token stream where ``sequence`` starts; for the number of sequences, the stream's length."""
        return self.token_count if sequence == len(self) else int(self._pointers[sequence]) // self.dtype.itemsize

    def first_tokens(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """``first_token`` of each of ``sequences``."""
        try:
            return self._pointers[sequences] // self.dtype.itemsize
        except IndexError:
            found = np.full(len(sequences), self.token_count, np.int64)
            inner = sequences < len(self)
            found[inner] = self._pointers[sequences[inner]] // self.dtype.itemsize
            return found

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``stop`` (exclusive) of the whole stream, as stored: a copy.

        Raises:
            IndexError: the range leaves the stream.
            ValueError: the dataset is closed.
        """
        out = np.empty(max(0, stop - start), self.dtype)
        self.read_into(start, stop, out)
        return out

    def read_into(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Tokens ``start`` to ``stop`` (exclusive) of the whole stream, into ``out``, of this length and any integer.

        Raises:
            IndexError: the range leaves the stream.
            ValueError: the dataset is closed.
        """
        tokens = self._open_tokens()
        if not 0 <= start <= stop <= len(tokens):
            raise IndexError(f"{self._bin}: tokens {start} to {stop} of {len(tokens)}")
        tokens.read_into(start, out)

    def read_ranges_into(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> None:
        """Ranges of the whole stream, one after another, into ``out``, as long as all of them, of any integer.

        Not checked: for who got the ranges from the index of this very pair.

        Raises:
            ValueError: the dataset is closed.
        """
        self._open_tokens().read_ranges_into(starts, lengths, out)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """The tokens of one sequence, as stored: a copy."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self._bin}: sequence {sequence} of {len(self)}")
        start = self.first_token(sequence)
        return self.read(start, start + int(self.sequence_lengths[sequence]))

    def _open_tokens(self) -> ArrayFile:
        if self._tokens is None:
            raise ValueError(f"{self._bin}: is closed")
        return self._tokens

    def close(self) -> None:
        """Let go of the files; reading afterwards raises. The mappings end with the last array that looks into them."""
        self._tokens = None
        self.sequence_lengths = np.zeros(0, np.int32)
        self._pointers = np.zeros(0, np.int64)
        self.document_indices = np.zeros(1, np.int64)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path, KnownFiles | None]]:
        """Another process opens the files for itself: they are no part of what is sent to it."""
        return IndexedDataset, (self.prefix.absolute(), self._known)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
