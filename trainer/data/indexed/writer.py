"""Writing the two files of an indexed dataset, a batch of documents at a time, in bounded memory and without traces."""

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
from trainer.data.indexed.parts import PairParts, PartFiles

_BUFFER = 1 << 20
_LOCKED = "documents"


class PairChecksums(NamedTuple):
    """SHA-256 of the two files, in hexadecimal: what ``sha256sum`` prints."""

    bin_sha256: str
    idx_sha256: str


class PairWriter:
    """Writes a .bin/.idx pair of tokens that were checked elsewhere.

    Everything goes to files beside the target whose names end in ``.partial``; ``finish`` renames them. Leaving the
    ``with`` block by an error, or without ``finish``, removes them and leaves an earlier pair as it was. What a killed
    process left of them is written over: one at a time writes a pair, by a lock that ends with its process.
    """

    def __init__(self, prefix: Path, code: int) -> None:
        """Begin the files of ``prefix``, whose tokens are of the dtype with number ``code``.

        Raises:
            DataError: another process is writing them.
            OSError: they cannot be made.
        """
        self.prefix = prefix
        self._bin, self._idx = files_of(prefix)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._partial = _partials(prefix)
        self._files: dict[str, BinaryIO] = {_LOCKED: _open_locked(self._partial[_LOCKED])}
        try:
            for part in ("bin", "lengths"):
                self._files[part] = self._partial[part].open("w+b", buffering=_BUFFER)
            files = PartFiles(*(self._files[part] for part in ("bin", "lengths", _LOCKED)))
            self._parts = PairParts(self._bin, files, code)
        except BaseException:
            self.discard()
            raise

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return self._parts.dtype

    @property
    def tokens(self) -> int:
        """How many were added."""
        return self._parts.tokens

    @property
    def sequences(self) -> int:
        """How many were added."""
        return self._parts.sequences

    @property
    def documents(self) -> int:
        """How many were added."""
        return self._parts.documents

    def append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Add whole documents.

        Args:
            tokens: of all their sequences one after another, each within the range of ``dtype``.
            lengths: of the sequences; they add up to the number of tokens.
            ends: for each document, after how many of ``lengths`` it ends; ascending. Where tables are copied part by
                part, all the ends come before the first of the lengths that they count.

        Raises:
            DataError: a sequence is longer than an index can say.
            OSError: the files cannot be written, as when the disk is full.
        """
        self._parts.append(tokens, lengths, ends)

    def finish(self) -> PairChecksums:
        """Write the index and put the pair in place. An old index goes first, so that no two halves ever look whole.

        Raises:
            OSError: the files cannot be written, as when the disk is full.
        """
        with self._partial["idx"].open("wb") as index:
            idx_sha256 = self._parts.write_index(index)
            flush_to_disk(index)
        flush_to_disk(self._files["bin"])
        self._idx.unlink(missing_ok=True)
        self._partial["bin"].replace(self._bin)
        self._partial["idx"].replace(self._idx)
        self.discard()
        return PairChecksums(self._parts.tokens_sha256, idx_sha256)

    def discard(self) -> None:
        """Remove what is unfinished. Without effect after ``finish``."""
        if not self._files:
            return
        for path in self._partial.values():
            path.unlink(missing_ok=True)
        for file in self._files.values():
            # What did not fit on the disk is written once more by closing, which closes all the same.
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
    """Remove what a killed process has left of writing ``prefix``.

    Raises:
        DataError: a process is writing it.
    """
    partials = _partials(prefix)
    if not any(path.exists() for path in partials.values()):
        return
    with _open_locked(partials[_LOCKED]):
        for path in partials.values():
            path.unlink(missing_ok=True)


def _partials(prefix: Path) -> dict[str, Path]:
    """In the order in which they are removed: with the last one the lock is let go of."""
    return {part: prefix.with_name(f"{prefix.name}.{part}.partial") for part in ("bin", "idx", "lengths", _LOCKED)}


def _open_locked(path: Path) -> BinaryIO:
    """``path``, empty, for this process alone.

    Raises:
        DataError: another process has it.
        OSError: it cannot be made.
    """
    while True:
        file = path.open("a+b", buffering=_BUFFER)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                f"{path}: another process is writing it; wait for its end, or choose another name"
            ) from None
        except OSError:
            # Some parallel file systems are mounted without locks; there nothing tells of another process.
            pass
        # Who had it may have renamed or removed it in between.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                # Opened to append, it stands at the end of what was left.
                file.truncate(0)
                file.seek(0)
                return file
        file.close()


def flush_to_disk(file: BinaryIO) -> None:
    """Write what is buffered, and wait until the disk has it."""
    file.flush()
    os.fsync(file.fileno())
