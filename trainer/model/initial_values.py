"""Initial values of matrices: drawn for the whole tensor in small pieces, of which a rank keeps its own.

Every layout draws the same numbers in the same order, so that all layouts start from the same weights. A piece is
thrown away as soon as the rank's elements are copied out of it: beside the weights themselves, a start takes the
memory of one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from trainer.distributed.random_streams import seeded_generator
from trainer.model.shard_box import Box

# torch fills float32 on CPUs from 16 numbers at a time, and draws 16 new ones for the end of a size that 16 does not
# divide; fewer than 16 are drawn in another way (normal_fill, aten/src/ATen/native/cpu/DistributionTemplates.h).
# Pieces that are multiples of 16, without a last one below 16, thus have the bits of a single draw.
_BLOCK = 16
# 256 KiB stay in the cache of a core until they are copied: an element takes 2.6 ns, cast to bfloat16 and copied, of
# which its draw takes 2.4 (one core of a Xeon with AVX-512, torch 2.13).
_PIECE = 65_536


@dataclass(frozen=True)
class RandomMatrix:
    """Random values of a matrix, in row-major order, from a random stream of its own.

    Attributes:
        address: of the random stream.
        shape: of the whole matrix, without vocabulary padding.
        spread: standard deviation of normally distributed values; else the bound of uniformly distributed ones.
        is_normal: the values are normally distributed around 0.
    """

    address: tuple[int | str, ...]
    shape: tuple[int, ...]
    spread: float
    is_normal: bool

    def fill(self, part: torch.Tensor, start: int, boxes: Sequence[Box], dtype: torch.dtype) -> None:
        """Write the values, rounded to ``dtype``, into a range of a rank's flattened shard.

        Elements outside of all boxes keep their values.

        Args:
            part: 1-D; the range, on any device.
            start: position of its first element in the flattened shard.
            boxes: the shard boxes, with places in ``shape``.
            dtype: of the model's weights; that of ``part`` may be wider.
        """
        bands = [band for box in boxes for band in _bands_of(box, self.shape, start, start + part.numel())]
        stop = max((band.stop for band in bands), default=0)
        generator = seeded_generator("cpu", *self.address)
        scratch = torch.empty(min(math.prod(self.shape), _PIECE + _BLOCK))
        for first, last in _pieces(math.prod(self.shape)):
            if first >= stop:  # no later element is kept
                return
            piece = self._draw(scratch[: last - first], generator).to(dtype)
            for band in bands:
                band.copy(piece, first, part)

    def _draw(self, piece: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if self.is_normal:
            return piece.normal_(0.0, self.spread, generator=generator)
        return piece.uniform_(-self.spread, self.spread, generator=generator)


def fill_all(fills: Iterable[Callable[[], object]], threads: int) -> None:
    """Run ``fills`` side by side, in this order: each has a random stream of its own, and torch draws without the GIL.

    Args:
        fills: writers of values, best with the longest first.
        threads: number that run at once.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="initial-weights")
    try:
        for filled in [pool.submit(fill) for fill in fills]:
            filled.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the pieces in which ``size`` elements are drawn."""
    first = 0
    while first < size:
        last = first + _PIECE if size - first >= _PIECE + _BLOCK else size
        yield first, last
        first = last


@dataclass(frozen=True)
class _Band:
    """Equally long parts of successive rows of a matrix, and their place in a part of a shard.

    Attributes:
        width: elements per row of the matrix.
        row, rows: first row, and number of rows.
        column, columns: first column, and number of columns.
        target: place of the first element in the part.
        target_width: distance of successive rows in the part.
    """

    width: int
    row: int
    rows: int
    column: int
    columns: int
    target: int
    target_width: int

    @property
    def stop(self) -> int:
        """Position after the last element in the flattened matrix."""
        return (self.row + self.rows - 1) * self.width + self.column + self.columns

    def copy(self, piece: torch.Tensor, first: int, part: torch.Tensor) -> None:
        """Copy the band's elements of ``piece``, which begins at element ``first`` of the flattened matrix."""
        for row, column, rows, columns in _rows(first, first + piece.numel(), self.width):
            top, left = max(row, self.row), max(column, self.column)
            height = min(row + rows, self.row + self.rows) - top
            extent = min(column + columns, self.column + self.columns) - left
            if height <= 0 or extent <= 0:
                continue
            source = piece.as_strided((height, extent), (self.width, 1), top * self.width + left - first)
            place = self.target + (top - self.row) * self.target_width + left - self.column
            target = part.as_strided((height, extent), (self.target_width, 1), part.storage_offset() + place)
            target.copy_(source)


def _bands_of(box: Box, shape: tuple[int, ...], start: int, stop: int) -> Iterator[_Band]:
    """Bands of a box within ``start`` and ``stop`` of the flattened shard.

    A box divides its last divided dim and at most dim 0 besides: it is a range of columns in a range of rows.
    """
    dim = max((dim for dim, size in enumerate(shape) if box.shape[dim] != size), default=0)
    assert box.shape[1:dim] == shape[1:dim], "a box divides dim 0 and one other"
    inner = math.prod(shape[dim + 1 :])
    columns = box.shape[dim] * inner
    first_row = box.offset[0] * math.prod(shape[1:dim]) if dim else 0
    low, high = max(start, box.start), min(stop, box.stop)
    for row, column, rows, length in _rows(low - box.start, high - box.start, columns):
        yield _Band(
            width=shape[dim] * inner,
            row=first_row + row,
            rows=rows,
            column=box.offset[dim] * inner + column,
            columns=length,
            target=box.start + row * columns + column - start,
            target_width=columns,
        )


def _rows(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """The range of a flattened matrix as a part of a row, whole rows, and a part of a row.

    Yields:
        first row, first column, number of rows, number of columns.
    """
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        columns = width if rows else min(width - column, stop - start)
        yield row, column, max(rows, 1), columns
        start += max(rows, 1) * columns
