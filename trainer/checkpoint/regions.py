"""Intersections of shard boxes of a global tensor, and of their flat ranges. Torch-free.

A rank stores or updates a contiguous range of a flattened shard box. Such a flat range consists of a few boxes, each
contiguous within the range, and boxes intersect dim by dim: so any layout reads any other layout's files element for
element, without searching.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """A box of a global tensor, row-major and contiguous within a flat tensor.

    Attributes:
        offset: first index in each dim of the global tensor.
        shape: extent in each dim.
        start: position of the region's first element in the flat tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Position after the region's last element."""
        return self.start + math.prod(self.shape)


def regions_of_flat_range(offset: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Regions of a box that make up its flattened elements ``start`` to ``stop``.

    The regions are in order.

    There are at most ``2 * dims - 1`` of them: a part of a row, whole rows, a part of a row. Parts of rows with
    several dims are divided further.

    Args:
        offset: of the box in the global tensor.
        shape: of the box.
        start: position of the first element in the flattened box.
        stop: position after the last element.
    """
    if start == 0 and stop == math.prod(shape):
        yield Region(offset, shape, 0)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:
        yield from _within_row(offset, shape, last, start, stop)
        return
    if start < first * row:
        yield from _within_row(offset, shape, first - 1, start, first * row)
    if first < last:
        yield Region((offset[0] + first, *offset[1:]), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _within_row(offset, shape, last, last * row, stop)


def _within_row(
    offset: tuple[int, ...], shape: tuple[int, ...], number: int, start: int, stop: int
) -> Iterator[Region]:
    before = number * math.prod(shape[1:])
    for part in regions_of_flat_range(offset[1:], shape[1:], start - before, stop - before):
        yield Region((offset[0] + number, *part.offset), (1, *part.shape), before + part.start)


def overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and shape of the intersection of two boxes; None if empty."""
    low = tuple(map(max, offset, other_offset))
    high = tuple(
        min(a + length, b + other) for a, length, b, other in zip(offset, shape, other_offset, other_shape, strict=True)
    )
    if any(stop <= first for first, stop in zip(low, high, strict=True)):
        return None
    return low, tuple(stop - first for first, stop in zip(low, high, strict=True))


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box of a global tensor."""


def is_partition(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """True if ``boxes`` hold every element of a ``shape`` exactly once.

    Elements outside of the shape make it False.
    """
    if len(boxes) == 1:
        return boxes[0] == ((0,) * len(shape), shape)
    if not shape:
        return False  # the element several times, or not at all
    edges = sorted({edge for (first, *_), (length, *_) in boxes for edge in (first, first + length)})
    if not edges or (edges[0], edges[-1]) != (0, shape[0]):
        return False
    # Between two neighbouring edges all rows of dim 0 lie in the same boxes.
    number = {edge: position for position, edge in enumerate(edges)}
    slabs: list[list[Box]] = [[] for _ in edges[1:]]
    for (first, *offset), (length, *extent) in boxes:
        for slab in slabs[number[first] : number[first + length]]:
            slab.append((tuple(offset), tuple(extent)))
    return all(is_partition(slab, shape[1:]) for slab in slabs)
