"""Epoch indexes in a folder, mapped into memory so that the processes of a node share one copy.

An index depends on nothing but the documents' lengths, the seed, the epochs and the sequence length. The cache is keyed
by exactly that, so that an entry is never stale, and every process may build its own, with or without shared files.

An entry is one file, little endian:

    8 bytes MAGIC | u64 documents D | u64 samples N | u64 bytes per sample | u64 CRC-32 of what follows
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
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainer.data.indexed.cache_entry import UNUSED_SECONDS, remove_older, write_entry
from trainer.data.indexed.checksum_cache import KnownFiles
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.mapped_file import map_file
from trainer.data.samples.epoch_index import EpochIndex, Epochs, build_epoch_index, samples_per_epoch

MAGIC = b"EPOCHIX4"
HEADER = struct.Struct("<8sQQQQ")
SUMMARY = struct.Struct("<16sq")
SMALLEST_CACHED = 1 << 16
"""Documents and samples from which on an index is worth a cache entry: so many take 2 ms to shuffle on one core, and
small data goes through thousands of epochs, which would leave as many entries."""
LONGEST_WAIT = 600.0
"""Seconds after which another process that builds the same index is taken to hang: 10^9 documents take less."""
TOUCH_SECONDS = 86_400.0
"""How often it is told of an entry that it is in use. Such a one is never removed or written anew: over NFS a page of
it that another node has mapped would be gone, and the process ended by SIGBUS."""
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0


@dataclass(frozen=True)
class LengthsSummary:
    """What an entry is found by, of the documents' lengths."""

    digest: bytes
    tokens: int

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int32]) -> LengthsSummary:
        """Reads all of them."""
        digest = hashlib.blake2b(np.ascontiguousarray(lengths, "<i4").data, digest_size=16).digest()
        return cls(digest, int(lengths.sum(dtype=np.int64)))

    @classmethod
    def of_sequences(cls, tokens: IndexedDataset, sequences: range) -> LengthsSummary:
        """Of ``sequences`` of an open pair, where that is known without reading them."""

        def read() -> bytes:
            found = cls.of(tokens.sequence_lengths[sequences.start : sequences.stop])
            return SUMMARY.pack(found.digest, found.tokens)

        return cls(*SUMMARY.unpack(tokens.remembered(f"lengths {sequences.start} {sequences.stop}", read)))


class EpochIndexCache:
    """The entries of one folder."""

    def __init__(self, folder: Path, prepared: Path | None = None, smallest: int = SMALLEST_CACHED) -> None:
        """Entries in ``folder``, which need not exist, for indexes of at least ``smallest`` documents and samples.

        Those that lie in the folder ``prepared`` are used too, and nothing is written there.
        """
        self._folder = folder
        self._places = (folder,) if prepared is None else (folder, prepared)
        self._smallest = smallest
        self._known = KnownFiles(folder)
        # A dataset reads one epoch, and maybe the last samples of the one before.
        self._in_use: deque[Path] = deque(maxlen=2)
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Tell other runs that the last two indexes are in use; to be called with every sample, does so once a day."""
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            for entry in self._in_use:
                with suppress(OSError):
                    os.utime(entry)

    def has(
        self, lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epochs: Epochs, summary: LengthsSummary
    ) -> bool:
        """Whether ``load_or_build`` has nothing to build."""
        shape, name = _shape_and_name(len(lengths), summary, seq_length, seed, epochs)
        return any(_open(folder / name, shape, self._known) is not None for folder in self._places)

    def load_or_build(
        self,
        lengths: npt.NDArray[np.int32],
        seq_length: int,
        seed: int,
        epochs: Epochs,
        summary: LengthsSummary | None = None,
    ) -> EpochIndex:
        """The index, from the cache where it is whole, else built.

        Any number of processes may call this at once, on one folder or on many. Of those that share a folder one builds
        and writes, and the others wait for it and map what it wrote, so that a node holds one copy. If it ends before,
        however it ends, another one takes its place. A folder that cannot be written costs only the building.
        """
        summary = summary or LengthsSummary.of(lengths)
        shape, name = _shape_and_name(len(lengths), summary, seq_length, seed, epochs)
        if sum(shape) < self._smallest:
            return build_epoch_index(lengths, seq_length, seed, epochs)
        for folder in self._places:
            found = self._found(folder / name, shape)
            if found is not None:
                return found
        entry = self._folder / name
        with ExitStack() as claim:
            try:
                claim.enter_context(_claimed(entry))
            except OSError:
                return build_epoch_index(lengths, seq_length, seed, epochs)
            # What the one that was waited for has made.
            _look_again(self._folder)
            found = self._found(entry, shape)
            if found is not None:
                return found
            built, shared = build_epoch_index(lengths, seq_length, seed, epochs), None
            with suppress(OSError):
                write_entry(entry, lambda file: _write(built, file))
                # Pages of the file are shared with the other processes of the node, what was built is not.
                shared = self._found(entry, shape, verify=False)
                for pattern in ("*.index", "*.claim", "*.sole", ".*.index.*"):
                    remove_older(self._folder, pattern, UNUSED_SECONDS)
        return shared or built

    def _found(self, entry: Path, shape: tuple[int, int], verify: bool = True) -> EpochIndex | None:
        found = _open(entry, shape, self._known, verify)
        if found is not None:
            self._in_use.append(entry)
        return found


@contextmanager
def _claimed(entry: Path) -> Iterator[None]:
    """While nobody else has claimed ``entry``.

    The lock ends with the process that holds it, so that a file that is left over delays nobody.

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
            raise TimeoutError(f"{claim}: is held by another process")
        try:
            yield
        finally:
            for path in (claim, sole):
                with suppress(OSError):
                    path.unlink()


def _pauses() -> Iterator[float]:
    """Seconds between two looks, until LONGEST_WAIT is over: a thousand processes ask one server."""
    # Not the generator that everybody shares: how often is asked would decide on what training draws from it.
    chance, pause = random.Random(), _FIRST_PAUSE
    deadline = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < deadline:
        yield pause * chance.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _take(file: BinaryIO, sole: Path) -> bool:
    """Whether the claim is ours: by a lock of ``file``, or, where there are no locks, by having made ``sole``."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some parallel file systems are mounted without locks.
        return _is_first(sole)
    return True


def _is_first(sole: Path) -> bool:
    """Whether there was no ``sole`` yet, or only one that a killed process has left."""
    with suppress(FileNotFoundError):
        if time.time() - sole.stat().st_mtime > LONGEST_WAIT:
            sole.unlink()
    try:
        os.close(os.open(sole, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _look_again(folder: Path) -> None:
    """Read ``folder``: an NFS client remembers for up to a minute that a file was not there."""
    with suppress(OSError), os.scandir(folder) as entries:
        next(entries, None)


def _shape_and_name(
    documents: int, summary: LengthsSummary, seq_length: int, seed: int, epochs: Epochs
) -> tuple[tuple[int, int], str]:
    """Documents and samples of the stream of ``epochs``, and the name of its entry."""
    shape = epochs.count * documents, samples_per_epoch(epochs.count * summary.tokens, seq_length)
    asked = f"{MAGIC!r} {seq_length} {seed} {epochs} {documents}\n".encode() + summary.digest
    return shape, f"{hashlib.blake2b(asked, digest_size=16).hexdigest()}.index"


def _open(entry: Path, shape: tuple[int, int], known: KnownFiles, verify: bool = True) -> EpochIndex | None:
    """The index in ``entry``; None where there is none, or a damaged one. What was just written needs no checking."""
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
    if verify and known.recall(entry, "whole") is None:
        if zlib.crc32(content[HEADER.size :].data) != checksum:
            return None
        known.keep(entry, status, "whole", b"")
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
        # See ArrayFile for file systems that do not map; there each process has a copy.
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
