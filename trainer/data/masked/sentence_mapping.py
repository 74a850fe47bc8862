"""Mapping from samples of BERT or T5 to sentences, in Megatron-LM's order.

Megatron-LM's build_mapping (megatron/core/datasets/helpers.cpp): sentences of a document are concatenated until they
reach a target length, which is the longest length or, for a share of samples, a shorter one. The rest at the end of a
document goes to its last sample. Then the samples are shuffled. Both random streams are those of C++.

A document takes one draw, and each of its samples one more, so that the position of a document in the random stream
depends on all documents before it. Therefore documents are processed one by one, but each sample takes a single search.
This module is plain numpy; trainer.data.masked.compiled_mapping has the compiled version. Memory: 8 bytes per sentence,
12 per sample, and 28 per sample during the shuffle.
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
"""A document of several sentences is skipped if a sentence has more tokens."""
CHUNK = 1 << 16
"""Documents processed at a time."""

_NEVER = 1 << 32
"""More than any 32-bit number drawn."""

Rows = npt.NDArray[np.integer[Any]]
"""[N, 3]: first sentence, end (exclusive), and target length of each sample."""


@dataclass(frozen=True)
class MappingRules:
    """Rules for concatenating sentences.

    Raises:
        DataError: a number is out of range.
    """

    longest: int
    """Usual target length of a sample in tokens, at least 2."""
    short_seq_prob: float
    """Share of samples with a shorter target, from 2 tokens on; rounded to 1 / n for an integer n."""
    seed: int
    least_sentences: int = 1
    """Fewest sentences of a sample; documents with fewer are skipped."""

    def __post_init__(self) -> None:
        if not 0 <= self.short_seq_prob <= 1:
            raise DataError(f"short_seq_prob: {self.short_seq_prob} is not between 0 and 1; 0.1 is usual")
        if self.longest < 2:
            raise DataError(f"longest: a target length of {self.longest} tokens is too short; use 2 or more")
        if self.least_sentences < 1:
            raise DataError(f"least_sentences: {self.least_sentences} is too small; use 1 or more")

    @property
    def one_in(self) -> int:
        """One in this many samples has a shorter target; 0: no sample."""
        # C++ rounds halves up, Python to the even neighbour.
        return math.floor(min(1 / self.short_seq_prob, _NEVER) + 0.5) if self.short_seq_prob else 0


def build_mapping(
    document_indices: npt.NDArray[np.int64],
    sentence_lengths: npt.NDArray[np.int32],
    rules: MappingRules,
    num_samples: int | None = None,
) -> Rows:
    """Build the shuffled samples of some documents.

    Args:
        document_indices: start of each document in ``sentence_lengths``, and the end of the last; ascending.
        sentence_lengths: tokens of each sentence of the whole corpus.
        rules: rules for concatenating sentences.
        num_samples: least number of samples, reached by whole epochs; None: one epoch.

    Returns:
        uint32 (int64 beyond 2^32 sentences) [N, 3]; N is 0 if no document is usable.
    """
    dtype = row_dtype(sentence_lengths)
    documents = _usable(document_indices, sentence_lengths, rules.least_sentences)
    first = int(document_indices[0]) if len(document_indices) else 0
    last = int(document_indices[-1]) if len(document_indices) else 0
    # Tokens before each sentence, counted from the first sentence of the first document.
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
    """Dtype of the rows of a corpus with these sentences."""
    return np.dtype(np.uint32 if len(sentence_lengths) < 1 << 32 else np.int64)


def _usable(
    document_indices: npt.NDArray[np.int64], sentence_lengths: npt.NDArray[np.int32], least: int
) -> npt.NDArray[np.int64]:
    """First sentence and end (exclusive) of the usable documents, [D, 2]."""
    entries = np.require(document_indices, requirements="A")
    counts = np.diff(entries)
    first, last = (int(entries[0]), int(entries[-1])) if len(entries) else (0, 0)
    long = np.flatnonzero(sentence_lengths[first:last] > LONG_SENTENCE) + first
    has_long = np.zeros(len(counts), np.bool_)
    has_long[np.searchsorted(entries, long, side="right") - 1] = True
    usable = (counts >= least) & ~(has_long & (counts > 1))
    return np.stack([entries[:-1][usable], entries[1:][usable]], axis=1)


def _targets(rules: MappingRules) -> Iterator[int]:
    """Endless target lengths of consecutive samples."""
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
    """Concatenate the sentences of ``documents`` [D, 2] to samples [N, 3], in order."""
    starts: list[int] = []
    stops: list[int] = []
    aims: list[int] = []
    for first, last in documents.tolist():
        start, target = first, next(targets)
        while start < last:
            stop = bisect_left(bounds, bounds[start] + target, start + least, last + 1)
            if stop >= last - 1:
                # Never leave a single sentence for a last sample.
                stop = last
            starts.append(start)
            stops.append(stop)
            aims.append(target)
            start, target = stop, next(targets)
    return np.stack([np.array(column, np.int64) for column in (starts, stops, aims)], axis=1)
