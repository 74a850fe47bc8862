"""Vectorized computation of a blend's order (trainer.data.samples.blend) in parallel segments. Torch-free.

The order is sequential, but it soon forgets its state: from slightly wrong counts it converges to the same counts. So
many segments are computed in parallel, each from a guess of the counts a few samples before its start.
Segments whose start differs from the end of the previous segment are repeated until all agree. The result is exact;
the quality of the guesses only affects the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.samples.windows import Numbers

MAX_COUNTS = 1 << 16
"""Largest number of counts in memory, datasets x segments, 8 bytes each: they fit a cache of the core."""
WARM_UP = 32
"""Samples between a guess and the start of its segment. For 10 datasets all guesses have converged after 5 samples, for
100 datasets after 64, and 99% of them after 30."""

Counts = npt.NDArray[np.int64]


class Followed(NamedTuple):
    """A computed part of the order."""

    datasets: npt.NDArray[np.integer]
    """Dataset of each sample, [step, segment]; the samples of a segment are consecutive."""
    samples: Numbers
    """Number of each sample within its dataset, [step, segment]."""
    after: Counts
    """Samples drawn from each dataset at the end of the part."""


def follow(
    weights: npt.NDArray[np.float64],
    counts: Counts,
    first: int,
    length: int,
    with_places: bool = True,
) -> Followed:
    """Compute the order of ``length`` samples from sample ``first`` on.

    Args:
        weights: weight of each dataset, float64, positive, with sum 1.
        counts: samples drawn from each dataset before ``first``.
        first: first sample.
        length: number of samples, a power of two.
        with_places: False leaves datasets and samples of the result empty.
    """
    segments = min(MAX_COUNTS, 1 << (length.bit_length() // 2 + 1))
    while segments > 1 and (segments * len(weights) > MAX_COUNTS or segments > length):
        segments //= 2
    steps = length // segments
    kept = steps if with_places else 0
    datasets = np.empty((kept, segments), np.int16 if len(weights) < 1 << 15 else np.int32)
    samples = np.empty((kept, segments), np.int64)
    firsts = first + np.arange(segments) * steps
    before = min(WARM_UP, steps // 2)
    states = _guess(weights, firsts - before, steps).astype(np.float64)
    # The first segment needs no guess.
    _step(weights, firsts[1:] - before, states[1:], before)
    states[0] = counts
    starts = states.copy()
    _step(weights, firsts, states, steps, datasets, samples)
    while len(wrong := np.flatnonzero((starts[1:] != states[:-1]).any(axis=1)) + 1):
        again = starts[wrong] = states[wrong - 1]
        own, own_samples = (np.empty((kept, len(wrong)), part.dtype) for part in (datasets, samples))
        _step(weights, firsts[wrong], again, steps, own, own_samples)
        states[wrong], datasets[:, wrong], samples[:, wrong] = again, own, own_samples
    return Followed(datasets, samples, states[-1].astype(np.int64))


def _step(
    weights: npt.NDArray[np.float64],
    firsts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.float64],
    steps: int,
    datasets: npt.NDArray[np.integer] | None = None,
    samples: Numbers | None = None,
) -> None:
    """Advance segments from ``firsts`` by ``steps`` samples; updates ``counts`` [segment, dataset] in place.

    The choices are stored in ``datasets`` and ``samples`` [step, segment], unless these are empty.
    """
    # Megatron-LM compares in float64, in which counts are exact up to 2^53.
    behind = np.empty_like(counts)
    every, rows = counts.reshape(-1), np.arange(len(counts)) * counts.shape[1]
    numbers = firsts.astype(np.float64)
    for step in range(steps):
        np.multiply(weights, np.maximum(numbers, 1.0)[:, None], out=behind)
        np.subtract(behind, counts, out=behind)
        chosen = behind.argmax(axis=1)
        places = rows + chosen
        drawn = every[places]
        if datasets is not None and samples is not None and len(datasets):
            datasets[step], samples[step] = chosen, drawn
        drawn += 1.0
        every[places] = drawn
        numbers += 1.0


def _guess(weights: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64], steps: int) -> Counts:
    """Guess the counts before each of ``numbers`` by largest remainders.

    Datasets drawn less than once in ``steps`` get none of the rest: a segment that lacks their sample draws it at once
    and converges, while a segment that has counted it too early stays wrong to its end.
    """
    due = weights * numbers[:, None].astype(np.float64)
    counts = np.floor(due).astype(np.int64)
    quick = np.flatnonzero(weights * steps >= 1)
    if not len(quick):
        quick = np.arange(len(weights))
    rest = numbers - counts.sum(axis=1)
    ranks = np.argsort(np.argsort((counts - due)[:, quick], axis=1), axis=1)
    counts[:, quick] += rest[:, None] // len(quick) + (ranks < rest[:, None] % len(quick))
    return counts
