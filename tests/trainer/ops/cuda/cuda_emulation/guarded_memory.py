"""Tensors between pages that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TypeVar

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_ACCESS = 0
"""Linux's PROT_NONE."""
OFFSETS = (16, 8, None)
"""Of tensors that are aligned, of those that are not, and of those that end where the page does."""

Shape = TypeVar("Shape")


def placed(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[tuple[Shape, torch.dtype, int | None]]:
    """Each shape in each dtype at one of OFFSETS: with three dtypes or more, each shape meets each offset.

    With three shapes or more, each dtype does too.
    """
    return [
        (shape, dtype, OFFSETS[(row + column) % len(OFFSETS)])
        for row, shape in enumerate(shapes)
        for column, dtype in enumerate(dtypes)
    ]


def guarded(values: torch.Tensor, *, offset: int | None = None) -> torch.Tensor:
    """A copy of contiguous ``values`` with a page before it, and one behind, that can be neither read nor written.

    Args:
        values: what is copied.
        offset: bytes between the page before and the copy, at which it is aligned or not; None: none are between the
            copy and the page behind.
    """
    page, size = mmap.PAGESIZE, values.numel() * values.element_size()
    inside = max(page, -(-(size + (offset or 0)) // page) * page)
    mapping = mmap.mmap(-1, inside + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for guard in (start, start + page + inside):
        assert _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _NO_ACCESS) == 0
    begin = page + (inside - size if offset is None else offset)
    if not size:
        return values.clone()
    # The tensor keeps the mapping.
    return (
        torch.frombuffer(mapping, dtype=values.dtype, count=values.numel(), offset=begin)
        .view(values.shape)
        .copy_(values)
    )
