"""Batched reading of token windows, in a few calls per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]
"""Tokens in their stored dtype, mostly two bytes, so that work on all tokens happens before the cast to int64."""
Numbers = npt.NDArray[np.int64]


class WindowReader(Protocol):
    """Samples that are windows of equal length and can be read in batches."""

    def windows(self, numbers: Numbers) -> Tokens:
        """Read N samples: [N, S + 1]."""


def read_windows(samples: object, numbers: Numbers) -> Tokens:
    """Read N >= 1 windows, batched if ``samples`` is a WindowReader: [N, S + 1]."""
    if hasattr(samples, "windows"):
        return cast(WindowReader, samples).windows(numbers)
    one_by_one = cast(Any, samples).sample
    return np.stack([one_by_one(number) for number in numbers.tolist()])


def read_blended(datasets: Sequence[object], which: npt.NDArray[np.integer[Any]], within: Numbers) -> Tokens:
    """Read samples ``within[n]`` of ``datasets[which[n]]``, batched per dataset: [N, S + 1]."""
    if len(datasets) == 1 or (which == which[0]).all():
        return read_windows(datasets[which[0]], within)
    order = which.argsort(kind="stable")
    firsts = np.flatnonzero(np.diff(which[order], prepend=-1)).tolist()
    parts = [
        read_windows(datasets[which[order[first]]], within[order[first:stop]])
        for first, stop in zip(firsts, [*firsts[1:], len(order)], strict=True)
    ]
    joined = np.concatenate(parts)
    windows = np.empty_like(joined)
    windows[order] = joined
    return windows
