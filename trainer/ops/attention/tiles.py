"""Tiles of the score matrix that a rank computes, each with its band of visible keys. Torch-free.

Legend: S sequence, ``/c`` = divided over cp. A score belongs to a query and a key. Tiles leave out the scores of later
keys, of keys before the window and of other documents, except for a tile's two corners beside its band.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from trainer.planning.sequence_division import held_chunks

Bounds = Sequence[Sequence[int]]
"""Per sample: first positions of the documents, ascending from 0, then the sample's length."""
Chunks = Sequence[tuple[int, int]]
"""First position and length of each sequence chunk of a rank, in local order."""


MAX_SCORES = 2**20
"""Scores of one head and sample that a kernel without tiles of its own holds at a time: 4 MiB in float32."""
_FEWEST_ROWS = 64


class Band(NamedTuple):
    """Keys that the queries of a rectangle see: query i sees key j if first <= j - i <= last.

    None: no limit. In every tile each query sees a key.
    """

    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, offset: int, causal: bool, window: int | None) -> Band:
        """The band of a rectangle whose first query lies ``offset`` positions behind its first key."""
        return cls(None if window is None else offset - window + 1, offset if causal else None)

    def moved(self, queries: int, keys: int) -> Band:
        """The same band without the rectangle's first ``queries`` and ``keys``."""
        first, last = (None if limit is None else limit + queries - keys for limit in self)
        return Band(first, last)

    def sides(self, queries: int, keys: int) -> tuple[int, int]:
        """Visible keys left and right of a query's own, -1 for all: the window sizes of flash-attn.

        A query's own key is the one that the last query and the last key have in common: both end together.
        """
        own = keys - queries
        return -1 if self.first is None else own - self.first, -1 if self.last is None else self.last - own


FULL = Band()
CAUSAL = Band(None, 0)
"""Band of a square in which each query sees the keys up to its own position."""


class Tile(NamedTuple):
    """A rectangle of scores, in indices of the local queries and keys.

    Attributes:
        sample: row of the micro-batch; None: all rows.
        query: first query, and the last query plus 1.
        key: first key, and the last key plus 1.
        band: keys that the queries see.
    """

    sample: int | None
    query: tuple[int, int]
    key: tuple[int, int]
    band: Band

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


def whole_tiles(
    queries: int, bounds: Bounds | None, keys: int | None = None, *, causal: bool = True, window: int | None = None
) -> tuple[Tile, ...]:
    """Tiles of undivided sequences. Each query is in exactly one tile.

    Args:
        queries: number of queries.
        bounds: document bounds; None: attention crosses document bounds.
        keys: number of keys, of which the queries are the last; None: as many as queries, which document bounds need.
        causal: a query sees no later keys.
        window: positions that a query sees, its own included; None: all.
    """
    keys = queries if keys is None else keys
    whole = Tile(None, (0, queries), (0, keys), Band.of(keys - queries, causal, window))
    chunks = ((0, queries),)
    tiles = _within_documents(whole, bounds, chunks, chunks)
    return tiles if window is None and keys == queries else _visible(tiles)


def ring_tiles(
    rank: int, source: int, size: int, length: int, bounds: Bounds | None, window: int | None = None
) -> tuple[Tile, ...]:
    """Tiles of the queries of ``rank`` and the keys of ``source``.

    Without document bounds and window all pairs of ranks have the same number of scores
    (trainer.planning.sequence_division). Of the 4 blocks of chunks, 2 are full; for a rank's own keys 1 block is full
    and 2 are causal.

    Args:
        rank: rank of the queries.
        source: rank of the keys.
        size: ranks of the ring.
        length: S/c, an even number.
        bounds: document bounds; None: attention crosses document bounds.
        window: positions that a query sees, its own included; None: all.
    """
    half = length // 2
    own, others = ring_chunks(rank, size, half), ring_chunks(source, size, half)
    if window is not None:
        return _ring_window_tiles(own, others, half, bounds or ((0, 2 * size * half),), window)
    if source == rank:
        # The later chunk sees the whole earlier chunk, which precedes it: together they are causal.
        block = Tile(None, (0, length), (0, length), CAUSAL)
    elif source < rank:
        # The source's earlier chunk lies before both local chunks, its later chunk after both.
        block = Tile(None, (0, length), (0, half), FULL)
    else:
        # Both chunks of the source lie between the two local chunks.
        block = Tile(None, (half, length), (0, length), FULL)
    return _within_documents(block, bounds, own, others)


def _ring_window_tiles(queries: Chunks, keys: Chunks, half: int, bounds: Bounds, window: int) -> tuple[Tile, ...]:
    # By pairs of chunks, because a window needs distances, and a rank's two chunks lie apart.
    samples = list(enumerate(bounds))
    if all(tuple(sample) == tuple(bounds[0]) for sample in bounds):
        samples = samples[:1]
    tiles = []
    for number, sample in samples:
        for document in zip(sample, sample[1:], strict=False):
            for (at, (start, _)), (key_at, (key_start, _)) in product(enumerate(queries), enumerate(keys)):
                query = _overlap((start, start + half), document)
                key = _overlap((key_start, key_start + half), document)
                if query[0] >= query[1] or key[0] >= key[1]:
                    continue
                shift, key_shift = at * half - start, key_at * half - key_start
                tiles.append(
                    Tile(
                        number if len(samples) > 1 else None,
                        (query[0] + shift, query[1] + shift),
                        (key[0] + key_shift, key[1] + key_shift),
                        Band.of(query[0] - key[0], True, window),
                    )
                )
    return _visible(tiles)


def row_blocks(
    queries: int, keys: int, band: Band, most_scores: int = MAX_SCORES, *, heads: int = 1
) -> tuple[Tile, ...]:
    """Divide a rectangle into blocks of whole rows, each with only the keys that its rows see.

    A block has at most ``most_scores`` scores of ``heads`` together, or 64 rows. With a window it also has at most as
    many rows as the window has keys, so that the cost is linear in the window.
    """
    most_scores //= heads
    rows = max(_FEWEST_ROWS, most_scores // keys)
    if band.first is not None and band.last is not None:
        seen = band.last - band.first + 1
        rows = max(_FEWEST_ROWS, min(seen, most_scores // (2 * seen)))
    return _visible(
        Tile(None, (start, min(start + rows, queries)), (0, keys), band.moved(start, 0))
        for start in range(0, queries, rows)
    )


def _visible(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """Cut off the queries that see no key and the keys that no query sees; leave out limits without effect."""
    return tuple(cut for cut in map(_cut_to_band, tiles) if cut is not None)


def _cut_to_band(tile: Tile) -> Tile | None:
    (query, query_stop), (key, key_stop) = tile.query, tile.key
    first, last = tile.band
    blind = 0 if last is None else max(0, -last)
    query, (first, last) = query + blind, tile.band.moved(blind, 0)
    unseen = 0 if first is None else max(0, first)
    key, (first, last) = key + unseen, Band(first, last).moved(0, unseen)
    if first is not None:
        query_stop = min(query_stop, query + key_stop - key - first)
    if last is not None:
        key_stop = min(key_stop, key + query_stop - query + last)
    if query >= query_stop or key >= key_stop:
        return None
    if first is not None and first <= query - query_stop + 1:
        first = None
    if last is not None and last >= key_stop - key - 1:
        last = None
    return Tile(tile.sample, (query, query_stop), (key, key_stop), Band(first, last))


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
            tiles.append(Tile(None, query, key, block.band))
    return tiles


def _local(position: int, chunks: Chunks) -> int:
    """Number of local positions before the global ``position``."""
    return sum(min(max(position - start, 0), length) for start, length in chunks)


def _overlap(one: tuple[int, int], other: Sequence[int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
