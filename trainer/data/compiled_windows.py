"""divide_windows in the library of kernels (csrc/data), which looks for documents while it copies tokens."""

from __future__ import annotations

import ctypes
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.compiled import Function, functions_of
from trainer.data.document_places import Bounds, DocumentEnds
from trainer.data.window_parts import EndRules, WindowDivider, WindowParts, divide_windows
from trainer.data.windows import Tokens

DTYPES = frozenset(map(np.dtype, (np.uint16, np.int32, np.int64)))
"""Of tokens that the library takes."""
FEW_TOKENS = 64
"""Room is made for documents of so many; for more of them it is made again."""


def window_divider(library: Path | None) -> WindowDivider:
    """What divides windows: functions in ``library``, as of functions_of, or divide_windows where there are none."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found = functions_of(
        library,
        {
            "llmctl_divide_windows": (number, [pointer, *[number] * 4, *[pointer] * 5, number]),
            "llmctl_document_positions": (None, [pointer, pointer, number, number, pointer]),
        },
    )
    if found is None:
        return divide_windows
    divide, positions = found
    return partial(_divide, divide, positions)


def _divide(divide: Function, positions: Function, windows: Tokens, rules: EndRules | None) -> WindowParts:
    # What is only copied, numpy copies as fast.
    if rules is None or windows.dtype not in DTYPES or not windows.flags.c_contiguous:
        return divide_windows(windows, rules)
    rows, length = windows.shape[0], windows.shape[1] - 1
    of_windows = (windows.ctypes.data, windows.itemsize, rows, length, rules.end)
    tokens, labels = (torch.from_numpy(np.empty((rows, length), np.int64)) for _ in range(2))
    counts = torch.from_numpy(np.empty((rows, length), np.bool_)) if rules.with_counts else None
    into = (tokens.data_ptr(), labels.data_ptr(), None if counts is None else counts.data_ptr())
    needed = rows * (2 + length // FEW_TOKENS)
    while True:
        # First of all where the bounds of each sample begin.
        listed, room = np.empty(rows + 1 + needed, np.int64), needed
        firsts = listed.ctypes.data
        needed = divide(*of_windows, *into, firsts, firsts + 8 * (rows + 1), room)
        if needed <= room:
            ends = _ListedEnds(listed, rows, length, positions) if rules.with_ends else None
            return WindowParts(tokens, labels, counts, ends)


class _ListedEnds(DocumentEnds):
    """Ends that the library has found."""

    def __init__(self, listed: npt.NDArray[np.int64], samples: int, length: int, positions: Function) -> None:
        """``listed``: firsts, [samples + 1], and bounds of csrc/include/token_windows.h."""
        super().__init__(samples, length)
        self._listed = listed
        self._find_positions = positions

    @cached_property
    def bounds(self) -> tuple[Bounds, ...]:
        firsts = self._listed[: self.samples + 1].tolist()
        bounds = tuple(self._listed[self.samples + 1 :][: firsts[-1]].tolist())
        return tuple([bounds[first:stop] for first, stop in pairwise(firsts)])

    def work_out_positions(self) -> npt.NDArray[np.int32]:
        found = np.empty((self.samples, self.length), np.int32)
        firsts = self._listed.ctypes.data
        bounds = firsts + 8 * (self.samples + 1)
        self._find_positions(firsts, bounds, self.samples, self.length, found.ctypes.data)
        return found
