"""Megatron-LM's indexed dataset, bit for bit: tokens in ``<prefix>.bin``, lengths in ``<prefix>.idx``.

The format (megatron/core/datasets/indexed_dataset.py), little endian:

    .bin  the tokens of all sequences one after another, nothing else
    .idx  9 bytes "MMIDIDX" 0 0 | u64 version 1 | u8 dtype | u64 S sequences | u64 D = documents + 1
          i32[S] sequence lengths | i64[S] byte offsets into .bin | i64[D] first sequence of each document, and S

An empty document has an entry but no sequence. Token ids below 65,500 are written as u16, others as i32.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from trainer.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of integer tokens. Megatron-LM also has 6 and 7, float64 and float32, which no tokenizer writes."""
CHUNK = 1 << 20
"""Entries held in memory at a time while an index is written or checked: 8 MiB of int64."""

TokenArray = npt.NDArray[np.int64]


def dtype_code(vocab_size: int) -> int:
    """Code of the narrowest dtype that Megatron-LM writes for a vocabulary: 8 (u16) below 65,500, else 4 (i32)."""
    return 8 if vocab_size < 65_500 else 4


def files_of(prefix: Path) -> tuple[Path, Path]:
    """The .bin and the .idx of a prefix, which may itself contain dots."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class IndexedDataset:
    """A .bin/.idx pair, mapped into memory and checked when it is opened.

    The token stream is contiguous, so that a range of sequences is one slice of it. What a reading method returned is
    the caller's own copy and stays valid after ``close``.
    """

    def __init__(self, prefix: Path) -> None:
        """Open and check the pair of ``prefix`` (a path without .bin or .idx).

        Raises:
            DataError: a file is missing, is no index, or the two do not belong together.
        """
        self.prefix = prefix
        self._bin, self._idx = files_of(prefix)
        missing = [str(path) for path in (self._bin, self._idx) if not path.is_file()]
        if missing:
            raise DataError(
                f"{' and '.join(missing)}: no such file; a data path is the common start of {self._bin.name} and "
                f"{self._idx.name}, as `python -m trainer preprocess` writes them"
            )
        dtype, sequences, documents = self._read_header()
        self._tokens: npt.NDArray[Any] | None = _map(self._bin, dtype)
        index = _map(self._idx, np.dtype("u1"))
        first, second = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
        self.sequence_lengths: npt.NDArray[np.int32] = index[HEADER.size : first].view("<i4")
        self._pointers: npt.NDArray[np.int64] = index[first:second].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = index[second : second + 8 * documents].view("<i8")
        self.dtype = dtype
        self._check_offsets()

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
            raise DataError(f"{self._idx}: has dtype code {code}, which is no integer token (known: {sorted(DTYPES)})")
        expected = HEADER.size + 12 * sequences + 8 * documents
        # Multimodal indexes carry one more byte per sequence, the mode, which plain tokens do not need.
        if size not in (expected, expected + sequences):
            raise DataError(
                f"{self._idx}: has {size:,} bytes where {sequences:,} sequences and {documents:,} document entries "
                f"take {expected:,}; it is damaged or cut off, prepare the data again"
            )
        return np.dtype(DTYPES[code]), sequences, documents

    def _check_offsets(self) -> None:
        position = 0
        for start in range(0, len(self.sequence_lengths), CHUNK):
            lengths = self.sequence_lengths[start : start + CHUNK]
            ends = position + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            starts = ends - lengths.astype(np.int64) * self.dtype.itemsize
            if lengths.min() < 0 or not np.array_equal(starts, self._pointers[start : start + CHUNK]):
                raise DataError(f"{self._idx}: its offsets do not follow from its lengths; prepare the data again")
            position = int(ends[-1])
        size = self._bin.stat().st_size
        if size != position:
            raise DataError(
                f"{self._bin}: has {size:,} bytes where {self._idx.name} lists {position:,}; one of the two is cut off "
                "or belongs to other data, prepare the data again"
            )
        entries = self.document_indices
        if not len(entries) or entries[0] != 0 or entries[-1] != len(self) or np.any(np.diff(entries) < 0):
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
        tokens = self._open_tokens()
        return len(tokens) if sequence == len(self) else int(self._pointers[sequence]) // self.dtype.itemsize

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``stop`` (exclusive) of the whole stream, as stored: a copy.

        Raises:
            IndexError: the range leaves the stream.
            ValueError: the dataset is closed.
        """
        tokens = self._open_tokens()
        if not 0 <= start <= stop <= len(tokens):
            raise IndexError(f"{self._bin}: tokens {start} to {stop} of {len(tokens)}")
        return np.array(tokens[start:stop])

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """The tokens of one sequence, as stored: a copy."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self._bin}: sequence {sequence} of {len(self)}")
        start = self.first_token(sequence)
        return self.read(start, start + int(self.sequence_lengths[sequence]))

    def _open_tokens(self) -> npt.NDArray[Any]:
        if self._tokens is None:
            raise ValueError(f"{self._bin}: is closed")
        return self._tokens

    def close(self) -> None:
        """Let go of the files; reading afterwards raises. The mappings end with the last array that looks into them."""
        self._tokens = None
        self.sequence_lengths = np.zeros(0, np.int32)
        self._pointers = np.zeros(0, np.int64)
        self.document_indices = np.zeros(1, np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class IndexedDatasetWriter:
    """Writes a .bin/.idx pair, one document at a time, in bounded memory.

    Everything goes to files beside the target whose names end in ``.partial``; ``finish`` renames them. Leaving the
    ``with`` block by an error, or without ``finish``, removes them and leaves an earlier pair as it was.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self.largest_token = -1
        self._code = dtype_code(vocab_size)
        self._dtype = np.dtype(DTYPES[self._code])
        self._bin, self._idx = files_of(prefix)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._partial = {
            part: prefix.with_name(f"{prefix.name}.{part}.{os.getpid()}.partial")
            for part in ("bin", "idx", "lengths", "documents")
        }
        self._files: dict[str, BinaryIO] = {
            part: self._partial[part].open("w+b") for part in ("bin", "lengths", "documents")
        }
        self._files["documents"].write(struct.pack("<q", 0))

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document; an empty one is counted and has no sequence, as in Megatron-LM.

        Raises:
            DataError: a token is negative or not below ``vocab_size``.
        """
        ids: TokenArray = np.asarray(tokens, dtype=np.int64)
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise DataError(
                    f"{self._bin}: document {self.documents} holds token {low if low < 0 else high}; "
                    f"a vocabulary of {self.vocab_size} has 0 to {self.vocab_size - 1}"
                )
            self._files["bin"].write(ids.astype(self._dtype).tobytes())
            self._files["lengths"].write(struct.pack("<i", ids.size))
            self.largest_token = max(self.largest_token, high)
            self.sequences += 1
            self.tokens += ids.size
        self.documents += 1
        self._files["documents"].write(struct.pack("<q", self.sequences))

    def finish(self) -> None:
        """Write the index and put the pair in place. An old index goes first, so that no two halves ever look whole."""
        with self._partial["idx"].open("wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1))
            self._copy("lengths", index)
            self._write_pointers(index)
            self._copy("documents", index)
            _flush_to_disk(index)
        _flush_to_disk(self._files["bin"])
        self._idx.unlink(missing_ok=True)
        self._partial["bin"].replace(self._bin)
        self._partial["idx"].replace(self._idx)
        self.discard()

    def _copy(self, part: str, index: BinaryIO) -> None:
        file = self._files[part]
        file.seek(0)
        while block := file.read(8 * CHUNK):
            index.write(block)

    def _write_pointers(self, index: BinaryIO) -> None:
        lengths = self._files["lengths"]
        lengths.seek(0)
        position = 0
        while block := lengths.read(4 * CHUNK):
            sizes = np.frombuffer(block, "<i4").astype(np.int64) * self._dtype.itemsize
            ends = position + np.cumsum(sizes)
            index.write((ends - sizes).astype("<i8").tobytes())
            position = int(ends[-1])

    def discard(self) -> None:
        """Remove what is unfinished. Without effect after ``finish``."""
        for file in self._files.values():
            file.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if path.stat().st_size % dtype.itemsize:
        raise DataError(f"{path}: its {path.stat().st_size:,} bytes are not whole tokens of {dtype.itemsize} bytes")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
