"""Which sentences of a corpus make a sample of BERT or T5, in Megatron-LM's order for the same files and seed.

Megatron-LM's build_mapping (megatron/core/datasets/helpers.cpp): sentences of a document are joined until they reach
a target length, which is the longest one or, now and then, a shorter one; what is left over at the end of a document
goes to its last sample. The samples are then shuffled. Both streams of random numbers are those of C++.

A document takes one draw and each of its samples one more, so that where a document stands in the stream depends on all
before it: documents are gone through one by one, but each sample in one search, whatever its sentences. Nothing is
compiled; trainer.data.masked.compiled_mapping has the same compiled beforehand. No more is held than 8 bytes per
sentence, and 12 per sample and 28 while they are shuffled.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.masked.mersenne_twister import shuffled_order, stream_32

LONG_SENTENCE = 512
"""A document of several sentences is left out if one of them has more tokens."""
CHUNK = 1 << 16
"""Documents gone through at a time."""

_NEVER = 1 << 32
"""One in more than the 32-bit numbers that are drawn."""

Rows = npt.NDArray[np.integer[Any]]
"""[N, 3]: first sentence, one after the last, and target length of each sample."""


@dataclass(frozen=True)
class MappingRules:
    """How sentences are joined.

    Raises:
        DataError: a number lies outside its range.
    """

    longest: int
    """Tokens that a sample aims at, at least 2."""
    short_seq_prob: float
    """Share of samples that aim at fewer, from 2 on; rounded to one in a whole number."""
    seed: int
    least_sentences: int = 1
    """Documents of fewer are left out, and no sample has fewer."""

    def __post_init__(self) -> None:
        if not 0 <= self.short_seq_prob <= 1:
            raise DataError(f"short_seq_prob: {self.short_seq_prob} is no share between 0 and 1; 0.1 is usual")
        if self.longest < 2:
            raise DataError(f"longest: a sample cannot aim at {self.longest} tokens; give 2 or more")
        if self.least_sentences < 1:
            raise DataError(f"least_sentences: no sample has {self.least_sentences}; give 1 or more")

    @property
    def one_in(self) -> int:
        """Of so many samples one aims at fewer tokens; 0: none."""
        # C++ rounds halves up, Python to the even neighbour.
        return math.floor(min(1 / self.short_seq_prob, _NEVER) + 0.5) if self.short_seq_prob else 0


def build_mapping(
    document_indices: npt.NDArray[np.int64],
    sentence_lengths: npt.NDArray[np.int32],
    rules: MappingRules,
    num_samples: int | None = None,
) -> Rows:
    """The samples of some documents, shuffled.

    Args:
        document_indices: where in ``sentence_lengths`` each document begins, and where the last one ends; ascending.
        sentence_lengths: tokens of each sentence of the whole corpus.
        rules: how they are joined.
        num_samples: whole epochs are added until there are so many; None: one epoch.

    Returns:
        uint32 (int64 beyond 2^32 sentences) [N, 3]; N is 0 if no document can be used.
    """
    dtype = row_dtype(sentence_lengths)
    documents = _usable(document_indices, sentence_lengths, rules.least_sentences)
    first = int(document_indices[0]) if len(document_indices) else 0
    last = int(document_indices[-1]) if len(document_indices) else 0
    # Tokens before each sentence, counted from the first document's.
    bounds = np.zeros(last - first + 1, np.int64)
    np.cumsum(sentence_lengths[first:last], out=bounds[1:])
    targets = _targets(rules)
    parts: list[Rows] = []
    made = 0
    while len(documents) and made < (1 if num_samples is None else num_samples):
        for start in range(0, len(documents), CHUNK):
            rows = _join(documents[start : start + CHUNK] - first, bounds.data, targets, rules.least_sentences)
            rows[:, :2] += first
            parts.append(rows.astype(dtype))
            made += len(rows)
    whole = np.concatenate([*parts, np.zeros((0, 3), dtype)])
    parts.clear()
    return whole[shuffled_order(made, rules.seed + 1)]


def row_dtype(sentence_lengths: npt.NDArray[np.int32]) -> np.dtype[Any]:
    """Of the rows of a corpus of these sentences."""
    return np.dtype(np.uint32 if len(sentence_lengths) < 1 << 32 else np.int64)


def _usable(
    document_indices: npt.NDArray[np.int64], sentence_lengths: npt.NDArray[np.int32], least: int
) -> npt.NDArray[np.int64]:
    """First sentence and end [D, 2] of the documents that samples are made of."""
    entries = np.require(document_indices, requirements="A")
    counts = np.diff(entries)
    first, last = (int(entries[0]), int(entries[-1])) if len(entries) else (0, 0)
    long = np.flatnonzero(sentence_lengths[first:last] > LONG_SENTENCE) + first
    has_long = np.zeros(len(counts), np.bool_)
    has_long[np.searchsorted(entries, long, side="right") - 1] = True
    usable = (counts >= least) & ~(has_long & (counts > 1))
    return np.stack([entries[:-1][usable], entries[1:][usable]], axis=1)


def _targets(rules: MappingRules) -> Iterator[int]:
    """The target length of one sample after another, without end."""
    one_in = rules.one_in
    if not one_in:
        return repeat(rules.longest)
    return chain.from_iterable(_draw_targets(rules, one_in))


def _draw_targets(rules: MappingRules, one_in: int) -> Iterator[list[int]]:
    for numbers in stream_32(rules.seed):
        drawn = numbers.astype(np.int64)
        yield np.where(drawn % one_in == 0, 2 + drawn % (rules.longest - 1), rules.longest).tolist()


def _join(
    documents: npt.NDArray[np.int64], bounds: memoryview, targets: Iterator[int], least: int
) -> npt.NDArray[np.int64]:
    """The samples [N, 3] of ``documents`` [D, 2], one document after another."""
    starts: list[int] = []
    stops: list[int] = []
    aims: list[int] = []
    for first, last in documents.tolist():
        start, target = first, next(targets)
        while start < last:
            stop = bisect_left(bounds, bounds[start] + target, start + least, last + 1)
            if stop >= last - 1:
                # A single sentence is never left over.
                stop = last
            starts.append(start)
            stops.append(stop)
            aims.append(target)
            start, target = stop, next(targets)
    return np.stack([np.array(column, np.int64) for column in (starts, stops, aims)], axis=1)
