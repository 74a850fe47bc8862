"""Cache folder of epoch indexes, memory-mapped and shared by a node's processes.

An index depends only on the documents' lengths, the seed, the epochs and the sequence length, which are the key of the
cache. So an entry is never stale, and every process may build its own index, with or without shared files.

An entry is one little-endian file:

    8 bytes MAGIC | u64 documents D | u64 samples N | u64 bytes per sample | u64 CRC-32 of the rest
    i64[D] ends | u32[N] or i64[N] samples | i32[D] documents
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainer.data.indexed.cache_entry import UNUSED_SECONDS, remove_older, write_entry
from trainer.data.indexed.checksum_cache import ChecksumCache
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.mapped_file import map_file
from trainer.data.samples.epoch_index import EpochIndex, Epochs, build_epoch_index, samples_per_epoch

MAGIC = b"EPOCHIX4"
HEADER = struct.Struct("<8sQQQQ")
SUMMARY = struct.Struct("<16sq")
SMALLEST_CACHED = 1 << 16
"""Smallest number of documents and samples of a cache entry: these take 2 ms to shuffle on one core, and small data
runs through thousands of epochs, which would leave as many entries."""
LONGEST_WAIT = 600.0
"""Seconds after which another process that builds the same index is assumed to hang: 10^9 documents take less."""
TOUCH_SECONDS = 86_400.0
"""Seconds between updates of an entry's modification time, which mark the entry as in use. An entry in use is never
removed or rewritten: over NFS a page that another node has mapped would vanish, and SIGBUS would end that process."""
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0


@dataclass(frozen=True)
class LengthsSummary:
    """Digest and sum of the documents' lengths, part of the key of an entry."""

    digest: bytes
    tokens: int

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int32]) -> LengthsSummary:
        """Compute the summary by reading all lengths."""
        digest = hashlib.blake2b(np.ascontiguousarray(lengths, "<i4").data, digest_size=16).digest()
        return cls(digest, int(lengths.sum(dtype=np.int64)))

    @classmethod
    def of_sequences(cls, tokens: IndexedDataset, sequences: range) -> LengthsSummary:
        """Summary of ``sequences`` of an open dataset, from the dataset's cache if possible."""

        def read() -> bytes:
            found = cls.of(tokens.sequence_lengths[sequences.start : sequences.stop])
            return SUMMARY.pack(found.digest, found.tokens)

        return cls(*SUMMARY.unpack(tokens.remembered(f"lengths {sequences.start} {sequences.stop}", read)))


@dataclass
class EpochIndexCache:
    """Epoch indexes cached in one folder.

    Attributes:
        folder: folder of the entries, which need not exist.
        prepared: folder whose entries are used too, but where nothing is written.
        smallest: least number of documents and samples of an entry.
    """

    folder: Path
    prepared: Path | None = None
    smallest: int = SMALLEST_CACHED
    _in_use: tuple[Path, ...] = ()
    """Entries of one epoch, and possibly of the previous one."""
    _touched: float = field(default_factory=time.monotonic)

    @property
    def _places(self) -> list[Path]:
        return [folder for folder in (self.folder, self.prepared) if folder is not None]

    @property
    def _checksums(self) -> ChecksumCache:
        return ChecksumCache(self.folder)

    def touch(self) -> None:
        """Mark the last two indexes as in use, once a day.

        Call it with every sample.
        """
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            for entry in self._in_use:
                with suppress(OSError):
                    os.utime(entry)

    def has(
        self, lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epochs: Epochs, summary: LengthsSummary
    ) -> bool:
        """True if ``load_or_build`` would find the index in the cache."""
        shape, name = _shape_and_name(len(lengths), summary, seq_length, seed, epochs)
        return any(_open(folder / name, shape, self._checksums) is not None for folder in self._places)

    def load_or_build(
        self,
        lengths: npt.NDArray[np.int32],
        seq_length: int,
        seed: int,
        epochs: Epochs,
        summary: LengthsSummary | None = None,
    ) -> EpochIndex:
        """Load the index from the cache, or build it.

        Safe for concurrent processes, on one folder or on several. Of the processes that share a folder one builds and
        writes the index; the others wait and map the entry, so that a node holds one copy. If the builder ends early,
        for whatever reason, another process takes over. If the folder is not writable, each process builds the index.
        """
        summary = summary or LengthsSummary.of(lengths)
        shape, name = _shape_and_name(len(lengths), summary, seq_length, seed, epochs)
        if sum(shape) < self.smallest:
            return build_epoch_index(lengths, seq_length, seed, epochs)
        for folder in self._places:
            found = self._found(folder / name, shape)
            if found is not None:
                return found
        entry = self.folder / name
        with ExitStack() as claim:
            try:
                claim.enter_context(_claimed(entry))
            except OSError:
                return build_epoch_index(lengths, seq_length, seed, epochs)
            # The process that held the claim may have written the entry.
            _look_again(self.folder)
            found = self._found(entry, shape)
            if found is not None:
                return found
            built, shared = build_epoch_index(lengths, seq_length, seed, epochs), None
            with suppress(OSError):
                write_entry(entry, lambda file: _write(built, file))
                # Pages of the file are shared with the other processes of the node; the built arrays are not.
                shared = self._found(entry, shape, verify=False)
                for pattern in ("*.index", "*.claim", "*.sole", ".*.index.*"):
                    remove_older(self.folder, pattern, UNUSED_SECONDS)
        return shared or built

    def _found(self, entry: Path, shape: tuple[int, int], verify: bool = True) -> EpochIndex | None:
        found = _open(entry, shape, self._checksums, verify)
        if found is not None:
            self._in_use = (*self._in_use[-1:], entry)
        return found


@contextmanager
def _claimed(entry: Path) -> Iterator[None]:
    """Hold the exclusive claim on ``entry``.

    The lock ends with its process, so that a leftover file delays no other process.

    Raises:
        OSError: the folder cannot be written, or another process has held the claim for LONGEST_WAIT.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    claim, sole = entry.with_suffix(".claim"), entry.with_suffix(".sole")
    with claim.open("wb") as file:
        for pause in _pauses():
            if _take(file, sole):
                break
            time.sleep(pause)
        else:
            raise TimeoutError(f"{claim}: another process holds the claim")
        try:
            yield
        finally:
            for path in (claim, sole):
                with suppress(OSError):
                    path.unlink()


def _pauses() -> Iterator[float]:
    """Pauses in seconds between attempts, with jitter and backoff, until LONGEST_WAIT is over."""
    # A separate generator: draws from the global one would change the random numbers of training.
    chance, pause = random.Random(), _FIRST_PAUSE
    deadline = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < deadline:
        yield pause * chance.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _take(file: BinaryIO, sole: Path) -> bool:
    """True if the claim was taken by a lock, or else by creating ``sole``."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some parallel file systems are mounted without locks.
        return _is_first(sole)
    return True


def _is_first(sole: Path) -> bool:
    """True if this process created ``sole``, replacing one left by a killed process."""
    with suppress(FileNotFoundError):
        if time.time() - sole.stat().st_mtime > LONGEST_WAIT:
            sole.unlink()
    try:
        os.close(os.open(sole, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _look_again(folder: Path) -> None:
    """Refresh the NFS client's cache of ``folder``.

    The client caches for up to a minute that a file did not exist.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        next(entries, None)


def _shape_and_name(
    documents: int, summary: LengthsSummary, seq_length: int, seed: int, epochs: Epochs
) -> tuple[tuple[int, int], str]:
    """Numbers of documents and samples of ``epochs``, and the file name of the entry."""
    shape = epochs.count * documents, samples_per_epoch(epochs.count * summary.tokens, seq_length)
    asked = f"{MAGIC!r} {seq_length} {seed} {epochs} {documents}\n".encode() + summary.digest
    return shape, f"{hashlib.blake2b(asked, digest_size=16).hexdigest()}.index"


def _open(entry: Path, shape: tuple[int, int], checksums: ChecksumCache, verify: bool = True) -> EpochIndex | None:
    """Map the index in ``entry``; None: missing or damaged. ``verify`` checks the checksum."""
    documents, samples = shape
    try:
        status = entry.stat()
        content = _content(entry)
        magic, *counts, width, checksum = HEADER.unpack(content[: HEADER.size].tobytes())
    except (OSError, struct.error):
        return None
    first, second = HEADER.size + 8 * documents, HEADER.size + 8 * documents + width * samples
    if magic != MAGIC or counts != [documents, samples] or width not in (4, 8):
        return None
    if len(content) != second + 4 * documents:
        return None
    if verify and checksums.recall(entry, "whole") is None:
        if zlib.crc32(content[HEADER.size :].data) != checksum:
            return None
        checksums.keep(entry, status, "whole", b"")
    if time.time() - status.st_mtime >= TOUCH_SECONDS:
        with suppress(OSError):
            os.utime(entry)
    numbers = content[first:second].view("<u4" if width == 4 else "<i8")
    return EpochIndex(content[second:].view("<i4"), content[HEADER.size : first].view("<i8"), numbers)


def _content(entry: Path) -> npt.NDArray[np.uint8]:
    try:
        return map_file(entry, np.dtype("u1"))
    except FileNotFoundError:
        raise
    except OSError:
        # Some file systems do not support mapping (see ArrayFile); there each process has a copy.
        return np.fromfile(entry, "u1")


def _write(index: EpochIndex, file: BinaryIO) -> None:
    width = index.samples.dtype.itemsize
    parts: list[npt.NDArray[Any]] = [
        part.astype(dtype, copy=False)
        for part, dtype in ((index.ends, "<i8"), (index.samples, f"<u{width}"), (index.documents, "<i4"))
    ]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.data, checksum)
    file.write(HEADER.pack(MAGIC, len(index.documents), len(index.samples), width, checksum))
    for part in parts:
        part.tofile(file)
