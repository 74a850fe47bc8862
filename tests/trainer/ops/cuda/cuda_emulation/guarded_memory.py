"""Tensors between guard pages."""

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
"""Offsets of aligned and unaligned tensors; None: tensors end at the page's end."""

Shape = TypeVar("Shape")


def placed(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[tuple[Shape, torch.dtype, int | None]]:
    """Each shape in each dtype at one of OFFSETS.

    Three or more dtypes combine each shape with each offset; three or more shapes combine each dtype with each offset.
    """
    return [
        (shape, dtype, OFFSETS[(row + column) % len(OFFSETS)])
        for row, shape in enumerate(shapes)
        for column, dtype in enumerate(dtypes)
    ]


def guarded(values: torch.Tensor, *, offset: int | None = None) -> torch.Tensor:
    """A copy of contiguous ``values`` between two inaccessible pages.

    Args:
        values: the tensor to copy.
        offset: bytes between the page before and the copy; None: the copy ends at the page behind.
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
    # The tensor keeps the mapping alive.
    return (
        torch.frombuffer(mapping, dtype=values.dtype, count=values.numel(), offset=begin)
        .view(values.shape)
        .copy_(values)
    )
