"""Which parts of the score matrix a rank computes: rectangles that need no mask but the causal one. Torch-free.

Legend: S sequence, ``/c`` = divided over cp. A score belongs to a query and a key; those of later keys, and those of
another document, are never computed. What is left of a block of scores are rectangles: full ones, and squares under
the causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.planning.sequence_division import held_chunks

Bounds = Sequence[Sequence[int]]
"""Of each sample: positions at which a document begins, ascending from 0, and the length of the sample."""
Chunks = Sequence[tuple[int, int]]
"""First position and length of each stretch of a sequence that a rank holds, in the order in which it holds them."""


class Tile(NamedTuple):
    """A rectangle of scores, in places along the local queries and the local keys.

    Attributes:
        sample: row of the micro-batch; None: all rows alike.
        query: first query and the one after the last.
        key: first key and the one after the last.
        causal: a square, of which each query takes the keys up to its own place.
    """

    sample: int | None
    query: tuple[int, int]
    key: tuple[int, int]
    causal: bool

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Index of its part of a tensor [B, A, S, ...]."""
        return self._samples, slice(None), slice(*self.query)

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        """The same for keys."""
        return self._samples, slice(None), slice(*self.key)

    @property
    def _samples(self) -> slice:
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)


def whole_tiles(length: int, bounds: Bounds | None) -> tuple[Tile, ...]:
    """The tiles of undivided sequences: each query has exactly one."""
    whole = Tile(None, (0, length), (0, length), causal=True)
    chunks = ((0, length),)
    return _within_documents(whole, bounds, chunks, chunks)


def ring_tiles(rank: int, source: int, size: int, length: int, bounds: Bounds | None) -> tuple[Tile, ...]:
    """The tiles between the queries of ``rank`` and the keys of ``source``.

    Without documents each pair of ranks has as many scores as any other (trainer.planning.sequence_division): 2 of the
    4 blocks of chunks are seen whole, or for a rank's own keys one whole and two half.

    Args:
        rank: whose queries.
        source: whose keys.
        size: ranks of the ring.
        length: S/c, an even number.
        bounds: where documents end; None: attention crosses from one to another.
    """
    half = length // 2
    if source == rank:
        # The later chunk sees all of the earlier one, which lies before it: together they are causal.
        block = Tile(None, (0, length), (0, length), causal=True)
    elif source < rank:
        # The source's earlier chunk lies before both of ours, its later one after both.
        block = Tile(None, (0, length), (0, half), causal=False)
    else:
        # Both chunks of the source lie between ours.
        block = Tile(None, (half, length), (0, length), causal=False)
    return _within_documents(block, bounds, ring_chunks(rank, size, half), ring_chunks(source, size, half))


def ring_chunks(rank: int, size: int, half: int) -> Chunks:
    """What ``rank`` holds of a sequence of ``2 * size`` chunks of ``half``."""
    return [(chunk * half, half) for chunk in held_chunks(rank, size, "p2p")]


def _within_documents(block: Tile, bounds: Bounds | None, queries: Chunks, keys: Chunks) -> tuple[Tile, ...]:
    if bounds is None:
        return (block,)
    if all(tuple(sample) == tuple(bounds[0]) for sample in bounds):
        return tuple(_cut(block, bounds[0], queries, keys))
    return tuple(
        tile._replace(sample=number)
        for number, sample in enumerate(bounds)
        for tile in _cut(block, sample, queries, keys)
    )


def _cut(block: Tile, bounds: Sequence[int], queries: Chunks, keys: Chunks) -> list[Tile]:
    # A document that reaches from one chunk of a rank into the other fills all between: its part is one stretch.
    query_bounds, key_bounds = ([_local(bound, chunks) for bound in bounds] for chunks in (queries, keys))
    tiles = []
    for number in range(len(bounds) - 1):
        query = _overlap(block.query, query_bounds[number : number + 2])
        key = _overlap(block.key, key_bounds[number : number + 2])
        if query[0] < query[1] and key[0] < key[1]:
            tiles.append(Tile(None, query, key, block.causal))
    return tiles


def _local(position: int, chunks: Chunks) -> int:
    """How many of the positions held lie before ``position``."""
    return sum(min(max(position - start, 0), length) for start, length in chunks)


def _overlap(one: tuple[int, int], other: Sequence[int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
