"""Order of GPT samples: shuffle documents, concatenate, cut into samples, shuffle samples.

A run of one epoch has exactly Megatron-LM's order (megatron/core/datasets/gpt_dataset.py): one legacy MT19937
``RandomState(seed)`` shuffles first the documents, then the samples. A sample has ``seq_length + 1`` tokens; its last
token is the first token of the next sample.

There are two orders for several epochs. Megatron-LM shuffles the documents of all epochs of the run together, so that
another ``train_iters`` gives another data order; see ``megatron_epochs``. Otherwise epoch e is shuffled separately by
``RandomState([seed, e])``: a run can be extended, and only the index of the current epoch is built. The price is that
each epoch drops a remainder of fewer than ``seq_length + 1`` tokens, of other documents each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 17
"""Documents per block of the cumulative sum: 1 MiB, which fits the cache of a core."""
MIN_LAST_EPOCH_SHARE = 0.80
"""Megatron-LM shuffles the last epoch with the others only if the run needs at least this share of the epoch."""


@dataclass(frozen=True)
class Epochs:
    """Epochs whose documents are shuffled together."""

    first: int = 0
    """Number of the first epoch, which selects the random stream."""
    count: int = 1
    separate_last: bool = False
    """True if the last epoch is shuffled separately and follows the others."""


@dataclass(frozen=True)
class EpochIndex:
    """Order of one epoch, or of several that are shuffled together."""

    documents: npt.NDArray[np.int32]
    """Documents of the split, numbered from its first, in the order of the stream."""
    ends: npt.NDArray[np.int64]
    """End in the stream of each of ``documents`` (exclusive)."""
    samples: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    """Samples of the stream in the order of training; int64 from 2^32 - 1 samples on."""


def samples_per_epoch(tokens: int, seq_length: int) -> int:
    """Number of samples of ``seq_length + 1`` tokens, overlapping by one, in ``tokens``."""
    return max(0, tokens - 1) // seq_length


def megatron_epochs(tokens: int, seq_length: int, num_samples: int) -> Epochs:
    """Epochs that Megatron-LM shuffles together for ``num_samples`` over ``tokens``, at least 1."""
    count = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if count == 1:
        return Epochs()
    from_last = num_samples - samples_per_epoch((count - 1) * tokens, seq_length)
    least = int(MIN_LAST_EPOCH_SHARE * samples_per_epoch(tokens, seq_length))
    return Epochs(count=count, separate_last=from_last < least)


def bytes_to_build(documents: int, tokens: int, seq_length: int, epochs: Epochs) -> int:
    """Memory that build_epoch_index needs."""
    samples = samples_per_epoch(epochs.count * tokens, seq_length)
    return 16 * epochs.count * documents + samples * _sample_dtype(samples).itemsize


def _sample_dtype(samples: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if samples < 2**32 - 1 else np.int64)


def build_epoch_index(lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epochs: Epochs) -> EpochIndex:
    """Build the order of ``epochs`` over documents of ``lengths`` tokens.

    The index takes 12 bytes per document and epoch and 4 per sample, and 4 more per document during the build.
    """
    # RandomState takes 32 bits; Megatron-LM's seeds are all within this range.
    seed %= 1 << 32
    random = np.random.RandomState(seed if epochs.first == 0 else [seed, epochs.first])
    together = epochs.count - epochs.separate_last
    # Align once: in an index file the lengths may be unaligned, and numpy would align them in every operation.
    lengths = np.require(lengths, requirements="A")
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs.count)
    _shuffle_in_two(random, documents, together * len(lengths))
    ends = _ends(lengths, documents)
    tokens = int(ends[-1]) if len(ends) else 0
    count = samples_per_epoch(tokens, seq_length)
    # numpy's shuffle draws the same numbers for every dtype, so that this is Megatron-LM's order beyond 2^32 too.
    samples = np.arange(count, dtype=_sample_dtype(count))
    _shuffle_in_two(random, samples, samples_per_epoch(tokens // epochs.count * together, seq_length))
    return EpochIndex(documents, ends, samples)


def _ends(lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """End of each of ``documents`` in their concatenation."""
    ends = np.empty(len(documents), np.int64)
    total = 0
    for start in range(0, len(documents), CHUNK):
        part = ends[start : start + CHUNK]
        part[:] = lengths[documents[start : start + CHUNK]]
        part[0] += total
        np.cumsum(part, out=part)
        total = int(part[-1])
    return ends


def _shuffle_in_two(random: np.random.RandomState, numbers: npt.NDArray[np.generic], first: int) -> None:
    """Shuffle the first ``first`` of ``numbers`` in place, then the rest."""
    for part in (numbers[:first], numbers[first:]):
        if len(part):
            random.shuffle(part)
