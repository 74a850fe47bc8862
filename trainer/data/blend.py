"""Several datasets served as one, in proportion to weights.

The order is Megatron-LM's (build_blending_indices in megatron/core/datasets/helpers.cpp): sample n comes from the
dataset that lies farthest behind its share, argmax_i(w_i max(n, 1) - c_i), the first of several; c_i counts what it has
served. The order of a run is thus the beginning of that of a longer one, and any number of samples can be drawn.

That is one step after another, but what state it is in is soon forgotten: started a little off, it comes back to the
same counts. So many stretches of the order are worked out at once, each from a guess of the counts a few samples before
its start, and those that start otherwise than the stretch before ends are done again, until none does. What comes out
is exact; how good the guesses are decides on the time alone. Nothing is kept of the order but the counts at
its every 2^24th sample, about a second apart for ten datasets. From those that are kept any place is at most that far
away; where none are, one in 10^9 samples is a minute away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.cache_entry import write_entry
from trainer.data.windows import Numbers, Tokens, read_blended

T_co = TypeVar("T_co", covariant=True)

BLOCK = 1 << 18
"""Samples whose places are held in memory at a time: about 30 ms of work for ten datasets."""
STRIDE = 1 << 24
"""Samples between counts that are kept, and at most worked out at once: about a second for ten datasets."""
MOST_COUNTS = 1 << 16
"""Counts held while stretches are worked out, 8 bytes each: of so many datasets times stretches, which stay in a cache
of the core."""
WARM_UP = 32
"""Samples before a stretch that its guess is for: of 10 datasets all guesses have come right after 5, of 100 after 64,
and 99 in 100 of them after 30."""

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
        self._datasets: npt.NDArray[np.integer] = np.zeros((0, 0), np.int16 if len(weights) < 1 << 15 else np.int32)
        self._samples = np.zeros((0, 0), np.int64)
        self._after = self._kept[0]

    def place(self, number: int) -> tuple[int, int]:
        """The dataset that sample ``number`` comes from, and its number within that dataset."""
        block, row = divmod(number, BLOCK)
        if block != self._block:
            self._work_out(block)
        stretch, step = divmod(row, len(self._datasets))
        return int(self._datasets[step, stretch]), int(self._samples[step, stretch])

    def places(self, numbers: Numbers) -> tuple[npt.NDArray[np.integer], Numbers]:
        """``place`` of each of ``numbers``, which ascend."""
        which, within = np.empty(len(numbers), self._datasets.dtype), np.empty(len(numbers), np.int64)
        cuts = np.flatnonzero(np.diff(numbers // BLOCK, prepend=-1)).tolist()
        for first, stop in zip(cuts, [*cuts[1:], len(numbers)], strict=True):
            block = int(numbers[first]) // BLOCK
            if block != self._block:
                self._work_out(block)
            stretches, steps = np.divmod(numbers[first:stop] - block * BLOCK, len(self._datasets))
            which[first:stop] = self._datasets[steps, stretches]
            within[first:stop] = self._samples[steps, stretches]
        return which, within

    def counts(self, number: int) -> Counts:
        """How many samples of each dataset come before sample ``number``."""
        block, row = divmod(number, BLOCK)
        counts = self._counts_before(block * BLOCK)
        if not row:
            return counts
        datasets = _follow(self._weights, counts, block * BLOCK, BLOCK).datasets.T.ravel()
        found: Counts = counts + np.bincount(datasets[:row], minlength=len(counts))
        return found

    def _work_out(self, block: int) -> None:
        counts = self._after if block == self._block + 1 else self._counts_before(block * BLOCK)
        self._datasets, self._samples, self._after = _follow(self._weights, counts, block * BLOCK, BLOCK)
        self._block = block
        self._keep((block + 1) * BLOCK, self._after)

    def _counts_before(self, number: int) -> Counts:
        """What each dataset has served before sample ``number``, a multiple of BLOCK."""
        stride = min(number // STRIDE, len(self._kept) - 1)
        first, counts = stride * STRIDE, self._kept[stride]
        while first < number:
            # The largest power of two that is left.
            length = min(STRIDE, 1 << ((number - first).bit_length() - 1))
            counts = _follow(self._weights, counts, first, length, with_places=False).after
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


class _Followed(NamedTuple):
    """A part of the order."""

    datasets: npt.NDArray[np.integer]
    """Of each sample, [step, stretch]: those of a stretch are one after another."""
    samples: Numbers
    """Which of its dataset's samples each is, [step, stretch]."""
    after: Counts
    """What each dataset has served in the end."""


def _follow(
    weights: npt.NDArray[np.float64], counts: Counts, first: int, length: int, with_places: bool = True
) -> _Followed:
    """The order from sample ``first`` on; ``length`` is a power of two. Without places, these are empty."""
    stretches = 1 << (length.bit_length() // 2 + 1)
    while stretches > 1 and (stretches * len(weights) > MOST_COUNTS or stretches > length):
        stretches //= 2
    steps = length // stretches
    kept = steps if with_places else 0
    datasets = np.empty((kept, stretches), np.int16 if len(weights) < 1 << 15 else np.int32)
    samples = np.empty((kept, stretches), np.int64)
    firsts = first + np.arange(stretches) * steps
    before = min(WARM_UP, steps // 2)
    states = _guess(weights, firsts - before, steps).astype(np.float64)
    # The first needs no guess, and has nothing before it.
    _step(weights, firsts[1:] - before, states[1:], before)
    states[0] = counts
    starts = states.copy()
    _step(weights, firsts, states, steps, datasets, samples)
    while len(wrong := np.flatnonzero((starts[1:] != states[:-1]).any(axis=1)) + 1):
        again = starts[wrong] = states[wrong - 1]
        own, own_samples = (np.empty((kept, len(wrong)), part.dtype) for part in (datasets, samples))
        _step(weights, firsts[wrong], again, steps, own, own_samples)
        states[wrong], datasets[:, wrong], samples[:, wrong] = again, own, own_samples
    return _Followed(datasets, samples, states[-1].astype(np.int64))


def _step(
    weights: npt.NDArray[np.float64],
    firsts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.float64],
    steps: int,
    datasets: npt.NDArray[np.integer] | None = None,
    samples: Numbers | None = None,
) -> None:
    """Follow stretches side by side for some ``steps``; changes their ``counts`` [stretch, dataset].

    What is chosen goes to ``datasets`` and ``samples`` [step, stretch], unless they are empty.
    """
    # Float64, in which Megatron-LM compares: counts are exact to 2^53.
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
