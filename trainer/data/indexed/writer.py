"""Atomic writer of an indexed dataset, in batches of documents and bounded memory."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import files_of
from trainer.data.indexed.lock_holder import holders_of, name_holder
from trainer.data.indexed.tables import IndexedDatasetTables, TableFiles

_BUFFER = 1 << 20
_LOCK = "lock"


class DatasetChecksums(NamedTuple):
    """SHA-256 of the two files in hexadecimal, as ``sha256sum`` prints them."""

    bin_sha256: str
    idx_sha256: str


class IndexedDatasetWriter:
    """Writes an indexed dataset from tokens that were checked elsewhere.

    All data goes to files beside the target whose names end in ``.partial``; ``finish`` renames them. Leaving the
    ``with`` block by an error, or without ``finish``, removes them and leaves an earlier dataset unchanged. Partial
    files of a killed process are overwritten. A lock, which ends with its process, allows one writer at a time.
    """

    def __init__(self, prefix: Path, code: int) -> None:
        """Open the partial files of ``prefix`` for tokens of the dtype ``code``.

        Raises:
            DataError: another process is writing this dataset.
            OSError: the files cannot be created.
        """
        self.prefix = prefix
        self._bin, self._idx = files_of(prefix)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._partial = _partials(prefix)
        self._files: dict[str, BinaryIO] = {_LOCK: _open_locked(self._partial[_LOCK])}
        try:
            for part in ("bin", "lengths", "documents"):
                self._files[part] = self._partial[part].open("w+b", buffering=_BUFFER)
            files = TableFiles(*(self._files[part] for part in ("bin", "lengths", "documents")))
            self._tables = IndexedDatasetTables(self._bin, files, code)
        except BaseException:
            self.discard()
            raise

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tokens."""
        return self._tables.dtype

    @property
    def tokens(self) -> int:
        """Number of tokens added."""
        return self._tables.tokens

    @property
    def sequences(self) -> int:
        """Number of sequences added."""
        return self._tables.sequences

    @property
    def documents(self) -> int:
        """Number of documents added."""
        return self._tables.documents

    def append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Add whole documents.

        Args:
            tokens: concatenated tokens of all sequences, within the range of ``dtype``.
            lengths: lengths of the sequences, whose sum is the number of tokens.
            ends: for each document the number of ``lengths`` up to its end; ascending. If tables are copied in several
                calls, all ends must be in the call that adds the first of their lengths.

        Raises:
            DataError: a sequence is longer than the index format allows.
            OSError: the files cannot be written, for example because the disk is full.
        """
        self._tables.append(tokens, lengths, ends)

    def finish(self) -> DatasetChecksums:
        """Write the index and rename the files into place.

        An old index is removed first, so that an old and a new file never look like a valid dataset.

        Raises:
            OSError: the files cannot be written, for example because the disk is full.
        """
        with self._partial["idx"].open("wb") as index:
            idx_sha256 = self._tables.write_index(index)
            flush_to_disk(index)
        flush_to_disk(self._files["bin"])
        self._idx.unlink(missing_ok=True)
        self._partial["bin"].replace(self._bin)
        self._partial["idx"].replace(self._idx)
        self.discard()
        return DatasetChecksums(self._tables.tokens_sha256, idx_sha256)

    def discard(self) -> None:
        """Remove the partial files. No effect after ``finish``."""
        if not self._files:
            return
        for path in self._partial.values():
            path.unlink(missing_ok=True)
        for file in self._files.values():
            # Closing flushes again and fails on a full disk, but the file is closed nevertheless.
            with suppress(OSError):
                file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def remove_partials(prefix: Path) -> None:
    """Remove the partial files that a killed writer of ``prefix`` has left.

    Raises:
        DataError: another process is writing this dataset.
    """
    partials = _partials(prefix)
    if not any(path.exists() for path in partials.values()):
        return
    with _open_locked(partials[_LOCK]):
        for path in partials.values():
            path.unlink(missing_ok=True)


def _partials(prefix: Path) -> dict[str, Path]:
    """Paths of the partial files in the order of removal.

    Removing the last one releases the lock.
    """
    parts = ("bin", "idx", "lengths", "documents", _LOCK)
    return {part: prefix.with_name(f"{prefix.name}.{part}.partial") for part in parts}


def _open_locked(path: Path) -> BinaryIO:
    """Open ``path`` with an exclusive lock; the file names this process.

    Raises:
        DataError: another process has the lock.
        OSError: the file cannot be created.
    """
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                f"{path}: {holders_of([path])} is writing this dataset; wait for its end, or choose another prefix"
            ) from None
        except OSError:
            # Some parallel file systems are mounted without locks; another process cannot be detected there.
            pass
        # The former holder may have renamed or removed the file in between.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                name_holder(file.fileno())
                return file
        file.close()


def flush_to_disk(file: BinaryIO) -> None:
    """Flush the buffer and wait until the data is on the disk."""
    file.flush()
    os.fsync(file.fileno())
