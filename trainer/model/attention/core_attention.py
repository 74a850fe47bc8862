"""Core attention: maps queries, keys and values to the context of each query.

Legend: S sequence, Q queries and K keys of this rank, B micro-batch, A heads, G query groups, R = A/G queries per
group, D width of a query or key head, V of a value head; ``/t`` = divided over tp, ``/c`` over cp.
Vaswani et al. 2017 (arXiv:1706.03762), equation 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainer.distributed.random_streams import DropoutSite, MicroBatchRandomness
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.context_parallel.axis import ContextParallel
from trainer.model.context_parallel.ring import ring_attention
from trainer.model.context_parallel.ulysses import divide_heads, divide_sequence
from trainer.model.dropout import apply_mask
from trainer.ops.attention.backend import AttentionBackend
from trainer.ops.attention.kept_weights import KeptWeights
from trainer.ops.attention.masked import masked_attention
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.single_query import single_query_attention
from trainer.ops.attention.tiled import TileAttention, Tiling, tiled_attention
from trainer.ops.attention.tiles import Tile, whole_tiles
from trainer.ops.attention.torch_call import torch_attention
from trainer.ops.bias_dropout_add import philox
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX

if TYPE_CHECKING:
    from trainer.data.samples.document_places import Documents


_ROWS, _COLUMNS, _LIBRARY = range(3)  # parts of a dropout site; of the last, one per first head of a rank


@dataclass(frozen=True)
class AttentionCore:
    """Attention of one layer.

    Attributes:
        layer: its number in the whole model.
        dropout: share of the attention weights that is dropped if the pass has randomness.
        axes: the axes along which the layer is divided.
        settings: scores, and the keys that a query sees.
        backend: the attention kernels.
        kernels: the kernel registry; attention that keeps its scores uses its softmax.
        site: address of the dropout masks within the layer.
    """

    layer: int
    dropout: float
    axes: ParallelAxes
    settings: AttentionSettings
    backend: AttentionBackend
    kernels: Kernels = Kernels()
    site: DropoutSite = "attention"

    def keeps_scores(self, forward_pass: ForwardPass) -> bool:
        """True if self-attention in ``forward_pass`` may keep its scores for backward."""
        return self.backend.keeps_scores and self.dropout > 0.0 and forward_pass.randomness is not None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    forward_pass: ForwardPass,
    core: AttentionCore,
    *,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Context [B, A/t, Q, V] of queries [B, A/t, Q, D] over keys [B, G/t, K, D] and values [B, G/t, K, V].

    In causal attention the last query has the position of the last key. With ``forward_pass.cache`` keys and values are
    added to it, and after its first pass each row's query sees all that the row has there. With
    ``forward_pass.documents`` a query attends to its own document only. Rank r of tp holds the query heads from r x A/t
    on. Collective: all cp ranks.

    Args:
        query: heads of this rank's queries.
        key: heads of the keys.
        value: heads of the values.
        forward_pass: documents and randomness.
        core: settings of the layer.
        sinks: logits [A/t] that take part in each head's softmax without a value; None: no sinks.
        bias: [A/t, Q, K] or [B, A/t, Q, K], added to the scaled scores; None: no bias.
        key_mask: [B, K], True for keys that take part, of which every query must see one; None: all keys.

    Raises:
        ValueError: a combination that attention does not have, such as a bias under context parallelism.
    """
    cache = forward_pass.cache
    if cache is not None:
        cache.store(core.layer, key, value)
        # The first pass has many queries and a causal mask; each later one has a single query that sees everything.
        if not cache.is_first_pass:
            key, value, seen = cache.visible(core.layer, core.settings.window)
            return single_query_attention(query, key, value, core.settings, seen, sinks)
    cp = core.axes.cp
    _check(query, key, forward_pass.documents, core, bias is not None or key_mask is not None)
    dropout = None
    if forward_pass.randomness is not None and core.dropout > 0.0:
        dropout = _Dropout(core, forward_pass.randomness, core.axes.tp.rank * query.shape[1])
    if cp.size > 1 and cp.communication == "p2p":
        settings = core.settings.within(key.shape[2] * cp.size)
        weights = None if dropout is None else dropout.ring_weights(query, cp)
        attention = TileAttention(core.backend.kernel, settings, weights)
        return ring_attention(query, key, value, forward_pass.documents, cp, attention, sinks)
    if cp.size == 1:
        return _attend_whole(query, key, value, forward_pass.documents, core, dropout, sinks, bias, key_mask)
    # a2a: whole sequences of some heads, whose numbers decide their dropout and their sinks.
    query, key, value = divide_heads(query, key, value, cp)
    first = cp.rank * query.shape[1]
    if dropout is not None:
        dropout = replace(dropout, first_head=dropout.first_head + first)
    if sinks is not None:
        sinks = sinks.narrow(0, first, query.shape[1])
    context = _attend_whole(query, key, value, forward_pass.documents, core, dropout, sinks)
    return divide_sequence(context, cp)


def _check(
    query: torch.Tensor, key: torch.Tensor, documents: Documents | None, core: AttentionCore, is_masked: bool
) -> None:
    queries, keys = query.shape[2], key.shape[2]
    if core.axes.cp.size > 1 and (is_masked or queries != keys or not core.settings.causal):
        raise ValueError("context parallelism divides causal self-attention only, without bias, key mask or cache")
    if documents is not None and (is_masked or queries != keys):
        raise ValueError("attention within documents needs as many keys as queries, and has neither bias nor key mask")
    if core.settings.causal and queries > keys:
        raise ValueError(f"causal attention of {queries} queries needs as many keys or more, not {keys}")


def _attend_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents | None,
    core: AttentionCore,
    dropout: _Dropout | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of undivided sequences; arguments of ``attend``."""
    queries, keys = query.shape[2], key.shape[2]
    settings = core.settings.within(keys)
    if bias is not None or key_mask is not None:
        weights = None if dropout is None else dropout.weights(query, keys)
        return masked_attention(query, key, value, settings, bias=bias, key_mask=key_mask, sinks=sinks, weights=weights)
    tiling = _tiling(documents, queries, keys, settings)
    is_plain = settings.is_plain and sinks is None and queries == keys
    if dropout is not None and is_plain and core.backend.keeps_scores:
        return _attend_with_dropout(query, key, value, tiling, documents, dropout)
    has_torch_call = is_plain or (not settings.causal and settings.softcap is None and sinks is None)
    has_torch_call = has_torch_call and query.shape[3] == value.shape[3] and len(tiling.tiles) == 1
    if has_torch_call and dropout is None and core.backend.name == "fused":
        return torch_attention(query, key, value, settings)
    if has_torch_call and dropout is not None and _has_library_dropout(query, core.backend):
        with dropout.library_stream(query.device):
            return torch_attention(query, key, value, settings, core.dropout)
    weights = None if dropout is None else dropout.weights(query, keys)
    return tiled_attention(query, key, value, tiling, TileAttention(core.backend.kernel, settings, weights), sinks)


def _tiling(documents: Documents | None, queries: int, keys: int, settings: AttentionSettings) -> Tiling:
    causal, window = settings.causal, settings.window
    if documents is None:
        return Tiling(whole_tiles(queries, None, keys, causal=causal, window=window))
    return documents.once(
        ("whole", queries, causal, window),
        lambda: Tiling(whole_tiles(queries, documents.bounds, causal=causal, window=window)),
    )


@dataclass(frozen=True)
class _Dropout:
    """The dropout of one layer and micro-batch.

    A mask depends on the places of head, sample, query and key in the whole model, not on the layout. Only the masks
    of torch's GPU kernels differ between layouts: each rank has a stream of its own, and repeats it when it resumes or
    recomputes.
    """

    core: AttentionCore
    randomness: MicroBatchRandomness
    first_head: int
    """Number of this rank's first head in the whole model."""

    def weights(self, query: torch.Tensor, keys: int) -> KeptWeights:
        """Weights that are kept of queries [B, A/t, Q, D] over ``keys`` keys."""
        queries = query.shape[2]
        return self._kept(query, torch.arange(queries), queries, keys)

    def ring_weights(self, query: torch.Tensor, cp: ContextParallel) -> KeptWeights:
        """Weights that are kept of this rank's queries [B, A/t, S/c, D] over all S keys."""
        length = query.shape[2] * cp.size
        return self._kept(query, cp.shard(torch.arange(length), 0), length, length)

    @contextmanager
    def library_stream(self, device: torch.device) -> Iterator[None]:
        """Seed torch's default generators for one call of a library kernel; all draws elsewhere go on as before."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed(_LIBRARY + self.first_head))
            yield

    def _kept(self, query: torch.Tensor, positions: torch.Tensor, length: int, keys: int) -> KeptWeights:
        """Weights of the queries at ``positions`` of ``length``."""
        batch, heads = query.shape[:2]
        first = self.first_head * batch
        samples = torch.arange(first, first + heads * batch).view(heads, batch, 1).transpose(0, 1)
        rows = philox(samples * length + positions, self._seed(_ROWS))[..., :2]
        columns = philox(torch.arange(keys), self._seed(_COLUMNS))[:, 0]
        return KeptWeights.of_words(rows.to(query.device), columns.to(query.device), self.core.dropout)

    def _seed(self, part: int) -> int:
        return self.randomness.dropout_seed(self.core.site, self.core.layer, part)


def _attend_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiling: Tiling,
    documents: Documents | None,
    dropout: _Dropout,
) -> torch.Tensor:
    """Plain causal attention with dropout. It keeps its scores, and runs on the softmax of the kernel registry."""
    length = query.shape[2]
    kept = dropout.weights(query, length).dropped().logical_not_()
    if documents is None or len(tiling.tiles) == 1:
        return _drop_and_attend(query, key, value, kept, dropout.core)
    contexts = []
    for sample in range(len(query)):
        tiles = [each._replace(sample=sample) for each in tiling.tiles if each.sample in (None, sample)]
        if len(tiles) == 1 or 2 * _area(tiles) < length**2:
            parts = [
                _drop_and_attend(query[at], key[keys], value[keys], kept[at][..., keys[2]], dropout.core)
                for at, keys in ((tile.queries, tile.keys) for tile in tiles)
            ]
            contexts.append(torch.cat(parts, dim=2))
            continue
        # With few long documents, scores over the whole sample cost at most twice as much and need fewer ops.
        unseen = documents.once(("unseen", length, sample), partial(_unseen, tiles, length, query.device))
        own = slice(sample, sample + 1)
        contexts.append(_drop_and_attend(query[own], key[own], value[own], kept[own], dropout.core, unseen))
    return torch.cat(contexts)


def _area(tiles: Sequence[Tile]) -> int:
    return sum((tile.query[1] - tile.query[0]) * (tile.key[1] - tile.key[0]) for tile in tiles)


def _unseen(tiles: Sequence[Tile], length: int, device: torch.device) -> torch.Tensor:
    """Mask [1, 1, S, S], True if a query does not see a key.

    A query sees neither later keys nor keys outside the causal ``tiles``.
    """
    unseen = torch.ones(length, length, dtype=torch.bool)
    for tile in tiles:
        unseen[slice(*tile.query), slice(*tile.key)] = False
    return unseen.logical_or_(torch.ones_like(unseen).triu_(1)).to(device)[None, None]


def _drop_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    core: AttentionCore,
    unseen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with dropout: causal, or over all keys except those ``unseen`` [1, 1, S, S]."""
    batch, _, length, head_dim = query.shape
    groups = key.shape[1]
    grouped = (query * core.settings.scale).reshape(batch, groups, -1, length, head_dim)  # [B, G/t, R, S, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    if unseen is None:
        shares = core.kernels[SCALED_CAUSAL_SOFTMAX](scores, 1.0)
    else:
        shares = core.kernels[SCALED_MASKED_SOFTMAX](scores.flatten(1, 2), unseen, 1.0).view(scores.shape)
    shares = apply_mask(shares, kept.view(shares.shape), core.dropout)
    return (shares @ value.unsqueeze(2)).flatten(1, 2)


def _has_library_dropout(query: torch.Tensor, backend: AttentionBackend) -> bool:
    """True if torch's fused kernels draw their own masks on the device: on CPUs they have no dropout."""
    return query.is_cuda and backend.name != "unfused"
