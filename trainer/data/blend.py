"""Several datasets served as one, in proportion to weights.

The order is Megatron-LM's (build_blending_indices in megatron/core/datasets/helpers.cpp): sample n comes from the
dataset that lies farthest behind its share, argmax_i(w_i max(n, 1) - c_i), the first of several; c_i counts what it has
served. The order of a run is thus the beginning of that of a longer one, and any number of samples can be drawn.

That is one step after another, but what state it is in is soon forgotten: started a little off, it comes back to the
same counts. So many stretches of the order are worked out at once, each from a guess of the counts at its start, and
those whose guess the stretch before proves wrong are done again, until every start is the end of the one before. What
comes out is exact; how good the guesses are decides on the time alone. Nothing is kept of the order but the counts at
its every 2^24th sample, about a second apart for ten datasets. From those that are kept any place is at most that far
away; where none are, one in 10^9 samples is a minute away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.cache_entry import write_entry
from trainer.data.windows import Numbers, Tokens, read_blended

T_co = TypeVar("T_co", covariant=True)

BLOCK = 1 << 18
"""Samples whose places are held in memory at a time: about 30 ms of work for ten datasets."""
STRIDE = 1 << 24
"""Samples between counts that are kept, and at most worked out at once: about a second for ten datasets."""
MOST_COUNTS = 1 << 20
"""Counts held while stretches are worked out, 8 bytes each: of so many datasets times stretches."""

Counts = npt.NDArray[np.int64]


class Numbered(Protocol[T_co]):
    """An endless sequence of samples."""

    def sample(self, number: int) -> T_co:
        """Sample ``number``."""


def normalized(weights: Sequence[float]) -> list[float]:
    """``weights`` divided by their sum, rounded as Megatron-LM's are."""
    numbers = np.asarray(weights, np.float64)
    shares: list[float] = (numbers / np.sum(numbers)).tolist()
    return shares


class BlendOrder:
    """Which dataset each sample of a blend comes from, and which of its samples it is."""

    def __init__(self, weights: Sequence[float], folder: Path | None = None) -> None:
        """The order for ``weights``, which are positive and add up to 1.

        Args:
            weights: of each dataset.
            folder: where counts are kept, which need not exist or be writable; None: nowhere.
        """
        self._weights = np.asarray(weights, np.float64)
        key = hashlib.blake2b(f"blend 1 {STRIDE}\n".encode() + self._weights.astype("<f8").tobytes(), digest_size=16)
        self._file = None if folder is None else folder / f"{key.hexdigest()}.blend"
        self._kept = [np.zeros(len(weights), np.int64), *self._load()]
        self._block = -1
        self._datasets: npt.NDArray[np.integer] = np.zeros(0, np.int16 if len(weights) < 1 << 15 else np.int32)
        self._samples = np.zeros(0, np.int64)
        self._after = self._kept[0]

    def place(self, number: int) -> tuple[int, int]:
        """The dataset that sample ``number`` comes from, and its number within that dataset."""
        block, row = divmod(number, BLOCK)
        if block != self._block:
            self._work_out(block)
        return int(self._datasets[row]), int(self._samples[row])

    def places(self, numbers: Numbers) -> tuple[npt.NDArray[np.integer], Numbers]:
        """``place`` of each of ``numbers``, which ascend."""
        which, within = np.empty(len(numbers), self._datasets.dtype), np.empty(len(numbers), np.int64)
        cuts = np.flatnonzero(np.diff(numbers // BLOCK, prepend=-1)).tolist()
        for first, stop in zip(cuts, [*cuts[1:], len(numbers)], strict=True):
            block = int(numbers[first]) // BLOCK
            if block != self._block:
                self._work_out(block)
            rows = numbers[first:stop] - block * BLOCK
            which[first:stop], within[first:stop] = self._datasets[rows], self._samples[rows]
        return which, within

    def counts(self, number: int) -> Counts:
        """How many samples of each dataset come before sample ``number``."""
        block, row = divmod(number, BLOCK)
        counts = self._counts_before(block * BLOCK)
        if not row:
            return counts
        datasets, _ = _follow(self._weights, counts, block * BLOCK, BLOCK)
        found: Counts = counts + np.bincount(datasets[:row], minlength=len(counts))
        return found

    def _work_out(self, block: int) -> None:
        counts = self._after if block == self._block + 1 else self._counts_before(block * BLOCK)
        self._datasets, self._after = _follow(self._weights, counts, block * BLOCK, BLOCK)
        self._samples = _numbers_within(self._datasets, counts)
        self._block = block
        self._keep((block + 1) * BLOCK, self._after)

    def _counts_before(self, number: int) -> Counts:
        """What each dataset has served before sample ``number``, a multiple of BLOCK."""
        stride = min(number // STRIDE, len(self._kept) - 1)
        first, counts = stride * STRIDE, self._kept[stride]
        while first < number:
            # The largest power of two that is left.
            length = min(STRIDE, 1 << ((number - first).bit_length() - 1))
            _, counts = _follow(self._weights, counts, first, length)
            first += length
            self._keep(first, counts)
        return counts

    def _keep(self, number: int, counts: Counts) -> None:
        if number != len(self._kept) * STRIDE:
            return
        self._kept.append(counts)
        if self._file is not None:
            with suppress(OSError):
                kept_counts = np.stack(self._kept[1:]).astype("<i8").tobytes()
                write_entry(self._file, lambda file: file.write(kept_counts))

    def _load(self) -> list[Counts]:
        if self._file is None:
            return []
        try:
            kept = np.fromfile(self._file, "<i8")
        except OSError:
            return []
        k = len(self._weights)
        rows = kept[: len(kept) // k * k].reshape(-1, k)
        # A file that was cut off or written over is worth nothing.
        whole = len(rows) * k == len(kept) and np.array_equal(rows.sum(axis=1), np.arange(1, len(rows) + 1) * STRIDE)
        return list(rows) if whole and not (np.diff(rows, axis=0, prepend=0) < 0).any() else []


class BlendedDataset(Generic[T_co]):
    """Samples of several datasets in the order of a blend."""

    def __init__(self, datasets: Sequence[Numbered[T_co]], order: BlendOrder) -> None:
        """``datasets``, in the order of the weights of ``order``."""
        self._datasets = tuple(datasets)
        self._order = order

    def sample(self, number: int) -> T_co:
        """Sample ``number`` of the blend."""
        dataset, within = self._order.place(number)
        return self._datasets[dataset].sample(within)

    def windows(self, numbers: Numbers) -> Tokens:
        """``sample`` of each of ``numbers``, which ascend and are windows: [N, S + 1]."""
        return read_blended(self._datasets, *self._order.places(numbers))


def _follow(
    weights: npt.NDArray[np.float64], counts: Counts, first: int, length: int
) -> tuple[npt.NDArray[np.integer], Counts]:
    """The datasets of samples ``first`` and on, and the counts after them; ``length`` is a power of two."""
    stretches = 1 << (length.bit_length() // 2)
    while stretches > 1 and stretches * len(weights) > MOST_COUNTS:
        stretches //= 2
    steps = length // stretches
    datasets = np.empty((steps, stretches), np.int16 if len(weights) < 1 << 15 else np.int32)
    firsts = first + np.arange(stretches) * steps
    starts = _guess(weights, firsts, steps)
    starts[0] = counts
    ends = np.empty_like(starts)
    wrong = np.arange(stretches)
    while len(wrong):
        ends[wrong] = _step(weights, firsts[wrong], starts[wrong], datasets, wrong)
        wrong = np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1)) + 1
        starts[wrong] = ends[wrong - 1]
    return datasets.T.ravel(), ends[-1]


def _step(
    weights: npt.NDArray[np.float64],
    firsts: npt.NDArray[np.int64],
    starts: Counts,
    datasets: npt.NDArray[np.integer],
    columns: npt.NDArray[np.int64],
) -> Counts:
    """Follow stretches side by side from their ``starts`` [stretch, dataset] on; returns the counts at their ends.

    What is chosen goes to ``columns`` of ``datasets`` [step, stretch].
    """
    # Float64, in which Megatron-LM compares: counts are exact to 2^53.
    counts = starts.T.astype(np.float64)
    behind = np.empty_like(counts)
    column = np.arange(len(firsts))
    numbers = firsts.astype(np.float64)
    for row in datasets:
        np.multiply(weights[:, None], np.maximum(numbers, 1.0), out=behind)
        behind -= counts
        chosen = behind.argmax(axis=0)
        counts[chosen, column] += 1.0
        row[columns] = chosen
        numbers += 1.0
    ends: Counts = counts.T.astype(np.int64)
    return ends


def _guess(weights: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64], steps: int) -> Counts:
    """Likely counts before each of ``numbers``: shares rounded down, the rest to the largest remainders.

    Datasets that are drawn less than once in ``steps`` have none of the rest: a stretch that lacks their sample draws
    it at once, while one that has it too early goes wrong to its end.
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


def _numbers_within(datasets: npt.NDArray[np.integer], counts: Counts) -> npt.NDArray[np.int64]:
    """For each of ``datasets`` which of its samples it is, after ``counts``."""
    order = np.argsort(datasets, kind="stable")
    drawn = np.bincount(datasets, minlength=len(counts))
    numbers = np.empty(len(datasets), np.int64)
    numbers[order] = np.arange(len(datasets)) + np.repeat(counts - (np.cumsum(drawn) - drawn), drawn)
    return numbers
