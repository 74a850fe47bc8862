"""Blends: several datasets as one, in proportion to weights.

The order is Megatron-LM's (build_blending_indices in megatron/core/datasets/helpers.cpp): sample n comes from the
dataset that is farthest behind its share, argmax_i(w_i max(n, 1) - c_i), the first of equals; c_i is the number of
samples drawn from dataset i. So the order of a run is a prefix of the order of a longer run, and it is endless.

Only the counts at every 2^24th sample are kept. For ten datasets numpy computes this distance in about a second, which
bounds the time to reach any place from the kept counts. Without kept counts a place at 10^9 samples takes a minute.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.indexed.cache_entry import UNUSED_SECONDS, remove_older, write_entry
from trainer.data.samples.blend_segments import Counts, follow
from trainer.data.samples.windows import Numbers, Tokens, read_blended

T_co = TypeVar("T_co", covariant=True)

BLOCK = 1 << 18
"""Samples whose places are in memory at a time: about 30 ms of work for ten datasets."""
STRIDE = 1 << 24
"""Samples between kept counts, and the most computed at once: about a second for ten datasets."""


class Numbered(Protocol[T_co]):
    """An endless sequence of samples."""

    def sample(self, number: int) -> T_co:
        """Read sample ``number``."""


def normalized(weights: Sequence[float]) -> list[float]:
    """``weights`` divided by their sum, with Megatron-LM's rounding."""
    numbers = np.asarray(weights, np.float64)
    shares: list[float] = (numbers / np.sum(numbers)).tolist()
    return shares


class BlendOrder:
    """Order of a blend: dataset of each sample, and its number there."""

    def __init__(self, weights: Sequence[float], folder: Path | None = None) -> None:
        """Prepare the order for ``weights``, which are positive and add up to 1.

        Args:
            weights: weight of each dataset.
            folder: folder of the kept counts, which need not exist or be writable; None: keep no counts.
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
        """Dataset of sample ``number``, and the sample's number within that dataset."""
        block, row = divmod(number, BLOCK)
        if block != self._block:
            self._work_out(block)
        segment, step = divmod(row, len(self._datasets))
        return int(self._datasets[step, segment]), int(self._samples[step, segment])

    def places(self, numbers: Numbers) -> tuple[npt.NDArray[np.integer], Numbers]:
        """Datasets and numbers within them of ascending ``numbers``; see place."""
        which, within = np.empty(len(numbers), self._datasets.dtype), np.empty(len(numbers), np.int64)
        cuts = np.flatnonzero(np.diff(numbers // BLOCK, prepend=-1)).tolist()
        for first, stop in zip(cuts, [*cuts[1:], len(numbers)], strict=True):
            block = int(numbers[first]) // BLOCK
            if block != self._block:
                self._work_out(block)
            segments, steps = np.divmod(numbers[first:stop] - block * BLOCK, len(self._datasets))
            which[first:stop] = self._datasets[steps, segments]
            within[first:stop] = self._samples[steps, segments]
        return which, within

    def counts(self, number: int) -> Counts:
        """Number of samples of each dataset before sample ``number``."""
        block, row = divmod(number, BLOCK)
        counts = self._counts_before(block * BLOCK)
        if not row:
            return counts
        datasets = follow(self._weights, counts, block * BLOCK, BLOCK).datasets.T.ravel()
        found: Counts = counts + np.bincount(datasets[:row], minlength=len(counts))
        return found

    def _work_out(self, block: int) -> None:
        counts = self._after if block == self._block + 1 else self._counts_before(block * BLOCK)
        self._datasets, self._samples, self._after = follow(self._weights, counts, block * BLOCK, BLOCK)
        self._block = block
        self._keep((block + 1) * BLOCK, self._after)

    def _counts_before(self, number: int) -> Counts:
        """Samples drawn from each dataset before sample ``number``, a multiple of BLOCK."""
        stride = min(number // STRIDE, len(self._kept) - 1)
        first, counts = stride * STRIDE, self._kept[stride]
        while first < number:
            # The largest power of two within the remaining distance.
            length = min(STRIDE, 1 << ((number - first).bit_length() - 1))
            counts = follow(self._weights, counts, first, length, with_places=False).after
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
                remove_older(self._file.parent, "*.blend", UNUSED_SECONDS)

    def _load(self) -> list[Counts]:
        if self._file is None:
            return []
        try:
            kept = np.fromfile(self._file, "<i8")
        except OSError:
            return []
        with suppress(OSError):
            os.utime(self._file)  # it is in use
        k = len(self._weights)
        rows = kept[: len(kept) // k * k].reshape(-1, k)
        # Ignore a truncated or damaged file.
        whole = len(rows) * k == len(kept) and np.array_equal(rows.sum(axis=1), np.arange(1, len(rows) + 1) * STRIDE)
        return list(rows) if whole and not (np.diff(rows, axis=0, prepend=0) < 0).any() else []


class BlendedDataset(Generic[T_co]):
    """Samples of several datasets in the order of a blend."""

    def __init__(self, datasets: Sequence[Numbered[T_co]], order: BlendOrder) -> None:
        """Blend ``datasets``, which are in the order of the weights of ``order``."""
        self._datasets = tuple(datasets)
        self._order = order

    def sample(self, number: int) -> T_co:
        """Read sample ``number`` of the blend."""
        dataset, within = self._order.place(number)
        return self._datasets[dataset].sample(within)

    def windows(self, numbers: Numbers) -> Tokens:
        """Read the windows of ascending ``numbers``: [N, S + 1]."""
        return read_blended(self._datasets, *self._order.places(numbers))
