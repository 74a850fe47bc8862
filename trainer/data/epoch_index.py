"""The order of one epoch: documents shuffled and joined to one stream, cut into samples, the samples shuffled.

Epoch 0 is Megatron-LM's order bit for bit (megatron/core/datasets/gpt_dataset.py): from one legacy MT19937
``RandomState(seed)`` first the documents are shuffled, then the samples; a sample is ``seq_length + 1`` tokens and its
last token is the first of the next one.

From epoch 1 on we differ on purpose. Megatron-LM shuffles as many epochs together as the run is long, so that another
``train_iters`` is another data order. Here epoch e has its own ``RandomState([seed, e])``: a run can be made longer,
and no more than the epoch at hand is ever built. The price is the remainder of an epoch that fills no sample, fewer
than ``seq_length + 1`` tokens, of other documents each time.

An index depends on nothing but the documents' lengths, the seed, the epoch and the sequence length. The cache is keyed
by exactly that, so that an entry is never stale and every process may build its own, with or without shared files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

CACHE_FORMAT = "llmctl epoch index 1"
SMALLEST_CACHED = 1 << 16
"""Documents and samples from which on an epoch is worth a cache entry: so many take 2 ms to shuffle on one core, and
small data goes through thousands of epochs, which would leave as many entries."""
CLAIM_SECONDS = 600.0
"""After this long without a result, another process may write an entry that one has claimed."""


@dataclass(frozen=True)
class EpochIndex:
    """The order of one epoch."""

    documents: npt.NDArray[np.int32]
    """Documents of the split, counted from its first, in the order of the stream."""
    ends: npt.NDArray[np.int64]
    """For each of ``documents``, the position in the stream after its last token."""
    samples: npt.NDArray[np.uint32]
    """Samples of the stream, in the order in which they are served."""


def samples_per_epoch(tokens: int, seq_length: int) -> int:
    """How many samples of ``seq_length + 1`` tokens, sharing their ends, fit into ``tokens``."""
    return max(0, tokens - 1) // seq_length


def build_epoch_index(lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epoch: int) -> EpochIndex:
    """The order of one epoch over documents of ``lengths`` tokens. Takes 12 bytes per document, 4 per sample."""
    # RandomState takes 32 bits; Megatron-LM's seeds all lie within.
    seed %= 1 << 32
    random = np.random.RandomState(seed if epoch == 0 else [seed, epoch])
    documents = np.arange(len(lengths), dtype=np.int32)
    random.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    count = samples_per_epoch(int(ends[-1]) if len(ends) else 0, seq_length)
    # numpy's shuffle draws the same numbers for every dtype, so that this is Megatron-LM's order also beyond 2^32.
    samples = np.arange(count, dtype=np.uint32 if count < 2**32 - 1 else np.int64)
    random.shuffle(samples)
    return EpochIndex(documents, ends, samples)


class EpochIndexCache:
    """Epoch indexes in a folder, mapped into memory so that the processes of a node share one copy."""

    def __init__(self, folder: Path, smallest: int = SMALLEST_CACHED) -> None:
        """Use ``folder``, which need not exist, for epochs of at least ``smallest`` documents and samples."""
        self._folder = folder
        self._smallest = smallest

    def load_or_build(self, lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epoch: int) -> EpochIndex:
        """The index, from the cache where it is whole, else built.

        Any number of processes may call this at once, on one folder or on many. They all build, for the same time as
        one would, and one of them writes; nobody waits. A folder that cannot be written costs only the building.
        """
        if len(lengths) + samples_per_epoch(int(lengths.sum(dtype=np.int64)), seq_length) < self._smallest:
            return build_epoch_index(lengths, seq_length, seed, epoch)
        entry = self._folder / _key(lengths, seq_length, seed, epoch)
        index = _open(entry, lengths, seq_length)
        if index is not None:
            return index
        index = build_epoch_index(lengths, seq_length, seed, epoch)
        with suppress(OSError):
            if self._claim(entry):
                _publish(index, entry, damaged=entry.exists() and _open(entry, lengths, seq_length) is None)
        return index

    def _claim(self, entry: Path) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        claim = entry.with_name(entry.name + ".claim")
        with suppress(FileNotFoundError):
            if time.time() - claim.stat().st_mtime > CLAIM_SECONDS:
                claim.unlink()
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def _key(lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epoch: int) -> str:
    digest = hashlib.blake2b(f"{CACHE_FORMAT} {seq_length} {seed} {epoch} {len(lengths)}\n".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(lengths, "<i4").data)
    return digest.hexdigest()


def _open(entry: Path, lengths: npt.NDArray[np.int32], seq_length: int) -> EpochIndex | None:
    try:
        documents, ends, samples = (
            np.load(entry / f"{field.name}.npy", mmap_mode="r", allow_pickle=False) for field in fields(EpochIndex)
        )
    except (OSError, ValueError, EOFError):
        return None
    tokens = int(ends[-1]) if len(ends) else 0
    whole = len(documents) == len(ends) == len(lengths) and len(samples) == samples_per_epoch(tokens, seq_length)
    return EpochIndex(documents, ends, samples) if whole else None


def _publish(index: EpochIndex, entry: Path, damaged: bool) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    claim = entry.with_name(entry.name + ".claim")
    try:
        for field in fields(EpochIndex):
            with (partial / f"{field.name}.npy").open("wb") as file:
                np.save(file, getattr(index, field.name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        partial.chmod(0o755)
        if damaged:
            shutil.rmtree(entry)
        # A folder cannot be renamed over one that holds files: the first writer wins, and all write the same.
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        claim.unlink(missing_ok=True)
