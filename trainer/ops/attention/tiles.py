"""Tiles of the score matrix that a rank computes, full or causal. Torch-free.

Legend: S sequence, ``/c`` = divided over cp. A score belongs to a query and a key. Scores of later keys and of other
documents are never computed. The remaining scores form rectangles without a mask and squares under the causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.planning.sequence_division import held_chunks

Bounds = Sequence[Sequence[int]]
"""Per sample: first positions of the documents, ascending from 0, then the sample's length."""
Chunks = Sequence[tuple[int, int]]
"""First position and length of each sequence chunk of a rank, in local order."""


class Tile(NamedTuple):
    """A rectangle of scores, in indices of the local queries and keys.

    Attributes:
        sample: row of the micro-batch; None: all rows.
        query: first query, and the last query plus 1.
        key: first key, and the last key plus 1.
        causal: True for a square in which each query sees the keys up to its own position.
    """

    sample: int | None
    query: tuple[int, int]
    key: tuple[int, int]
    causal: bool

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Index of the tile's queries in a tensor [B, A, S, ...]."""
        return self._samples, slice(None), slice(*self.query)

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        """Index of the tile's keys in a tensor [B, G, S, ...]."""
        return self._samples, slice(None), slice(*self.key)

    @property
    def _samples(self) -> slice:
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)


def whole_tiles(length: int, bounds: Bounds | None) -> tuple[Tile, ...]:
    """Tiles of undivided sequences. Each query is in exactly one tile."""
    whole = Tile(None, (0, length), (0, length), causal=True)
    chunks = ((0, length),)
    return _within_documents(whole, bounds, chunks, chunks)


def ring_tiles(rank: int, source: int, size: int, length: int, bounds: Bounds | None) -> tuple[Tile, ...]:
    """Tiles of the queries of ``rank`` and the keys of ``source``.

    Without document bounds all pairs of ranks have the same number of scores (trainer.planning.sequence_division). Of
    the 4 blocks of chunks, 2 are full; for a rank's own keys 1 block is full and 2 are causal.

    Args:
        rank: rank of the queries.
        source: rank of the keys.
        size: ranks of the ring.
        length: S/c, an even number.
        bounds: document bounds; None: attention crosses document bounds.
    """
    half = length // 2
    if source == rank:
        # The later chunk sees the whole earlier chunk, which precedes it: together they are causal.
        block = Tile(None, (0, length), (0, length), causal=True)
    elif source < rank:
        # The source's earlier chunk lies before both local chunks, its later chunk after both.
        block = Tile(None, (0, length), (0, half), causal=False)
    else:
        # Both chunks of the source lie between the two local chunks.
        block = Tile(None, (half, length), (0, length), causal=False)
    return _within_documents(block, bounds, ring_chunks(rank, size, half), ring_chunks(source, size, half))


def ring_chunks(rank: int, size: int, half: int) -> Chunks:
    """Chunks of ``rank`` in a sequence of ``2 * size`` chunks of length ``half``."""
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
    # A document in both chunks of a rank covers all positions between them, so its local part is contiguous.
    query_bounds, key_bounds = ([_local(bound, chunks) for bound in bounds] for chunks in (queries, keys))
    tiles = []
    for number in range(len(bounds) - 1):
        query = _overlap(block.query, query_bounds[number : number + 2])
        key = _overlap(block.key, key_bounds[number : number + 2])
        if query[0] < query[1] and key[0] < key[1]:
            tiles.append(Tile(None, query, key, block.causal))
    return tiles


def _local(position: int, chunks: Chunks) -> int:
    """Number of local positions before the global ``position``."""
    return sum(min(max(position - start, 0), length) for start, length in chunks)


def _overlap(one: tuple[int, int], other: Sequence[int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
