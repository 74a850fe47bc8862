"""The order of samples: documents shuffled and joined to one stream, cut into samples, the samples shuffled.

A run of one epoch has Megatron-LM's order bit for bit (megatron/core/datasets/gpt_dataset.py): from one legacy MT19937
``RandomState(seed)`` first the documents are shuffled, then the samples; a sample is ``seq_length + 1`` tokens and its
last token is the first of the next one.

From the second epoch on there are two ways. Megatron-LM shuffles the documents of as many epochs together as the run
is long, so that another ``train_iters`` is another data order; ``megatron_epochs`` says which. Otherwise epoch e is
shuffled by itself, from ``RandomState([seed, e])``: a run can be made longer, and no more than the epoch at hand is
ever built. The price is the remainder of an epoch that fills no sample, fewer than ``seq_length + 1`` tokens, of other
documents each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 17
"""Documents summed up at a time: 1 MiB, which stays in the cache of a core."""
LEAST_OF_LAST_EPOCH = 0.80
"""Megatron-LM shuffles the last epoch with the others only if the run needs so much of it."""


@dataclass(frozen=True)
class Epochs:
    """Epochs whose documents are shuffled together."""

    first: int = 0
    """Number of the first of them, which chooses the stream of random numbers."""
    count: int = 1
    separate_last: bool = False
    """The last of them is shuffled by itself and comes after the others."""


@dataclass(frozen=True)
class EpochIndex:
    """The order of one epoch, or of several that are shuffled together."""

    documents: npt.NDArray[np.int32]
    """Documents of the split, counted from its first, in the order of the stream."""
    ends: npt.NDArray[np.int64]
    """For each of ``documents``, the position in the stream after its last token."""
    samples: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    """Samples of the stream, in the order in which they are served; int64 from 2^32 - 1 on."""


def samples_per_epoch(tokens: int, seq_length: int) -> int:
    """How many samples of ``seq_length + 1`` tokens, sharing their ends, fit into ``tokens``."""
    return max(0, tokens - 1) // seq_length


def megatron_epochs(tokens: int, seq_length: int, num_samples: int) -> Epochs:
    """The epochs that Megatron-LM shuffles for a run of ``num_samples`` over a split of ``tokens``, at least 1."""
    count = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if count == 1:
        return Epochs()
    from_last = num_samples - samples_per_epoch((count - 1) * tokens, seq_length)
    least = int(LEAST_OF_LAST_EPOCH * samples_per_epoch(tokens, seq_length))
    return Epochs(count=count, separate_last=from_last < least)


def bytes_to_build(documents: int, tokens: int, seq_length: int, epochs: Epochs) -> int:
    """Memory that build_epoch_index takes for ``epochs`` over so many documents with so many tokens."""
    samples = samples_per_epoch(epochs.count * tokens, seq_length)
    return 16 * epochs.count * documents + samples * _sample_dtype(samples).itemsize


def _sample_dtype(samples: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if samples < 2**32 - 1 else np.int64)


def build_epoch_index(lengths: npt.NDArray[np.int32], seq_length: int, seed: int, epochs: Epochs) -> EpochIndex:
    """The order of ``epochs`` over documents of ``lengths`` tokens.

    It has 12 bytes per document and epoch and 4 per sample, and takes 4 more per document while it is made.
    """
    # RandomState takes 32 bits; Megatron-LM's seeds all lie within.
    seed %= 1 << 32
    random = np.random.RandomState(seed if epochs.first == 0 else [seed, epochs.first])
    together = epochs.count - epochs.separate_last
    # In an index file they lie at any address, and numpy would bring them into line each time.
    lengths = np.require(lengths, requirements="A")
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs.count)
    _shuffle_in_two(random, documents, together * len(lengths))
    ends = _ends(lengths, documents)
    tokens = int(ends[-1]) if len(ends) else 0
    count = samples_per_epoch(tokens, seq_length)
    # numpy's shuffle draws the same numbers for every dtype, so that this is Megatron-LM's order also beyond 2^32.
    samples = np.arange(count, dtype=_sample_dtype(count))
    _shuffle_in_two(random, samples, samples_per_epoch(tokens // epochs.count * together, seq_length))
    return EpochIndex(documents, ends, samples)


def _ends(lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Where each of ``documents`` ends, one after another."""
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
    """Shuffle the ``first`` of ``numbers``, then the rest, each in its place."""
    for part in (numbers[:first], numbers[first:]):
        if len(part):
            random.shuffle(part)
