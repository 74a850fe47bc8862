"""Windows of tokens of many samples at once: what a step reads, in a few calls however many samples it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]
"""As they are stored, mostly in two bytes: what is done to all of them is done before they take eight."""
Numbers = npt.NDArray[np.int64]


class WindowReader(Protocol):
    """Samples that are windows of equal length, of which many are read at once."""

    def windows(self, numbers: Numbers) -> Tokens:
        """Samples ``numbers``, N of them: [N, S + 1]."""


def read_windows(samples: object, numbers: Numbers) -> Tokens:
    """Samples ``numbers``, at least one, of what has windows of S + 1 tokens, and maybe a WindowReader: [N, S + 1]."""
    if hasattr(samples, "windows"):
        return cast(WindowReader, samples).windows(numbers)
    one_by_one = cast(Any, samples).sample
    return np.stack([one_by_one(number) for number in numbers.tolist()])


def read_blended(datasets: Sequence[object], which: npt.NDArray[np.integer[Any]], within: Numbers) -> Tokens:
    """Sample ``within[n]`` of ``datasets[which[n]]`` for each n, [N, S + 1]; of one dataset all at once."""
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
