"""Core attention: maps queries, keys and values to the context of each query.

Legend: S this rank's part of the sequence, B micro-batch, A heads, G query groups, R = A/G queries per group, D head
width; ``/t`` = divided over tp, ``/c`` over cp. Vaswani et al. 2017 (arXiv:1706.03762), equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.context_parallel.ring import ring_attention
from trainer.model.context_parallel.ulysses import divide_heads, divide_sequence
from trainer.model.dropout import apply_mask, draw_mask
from trainer.ops.attention.backend import AttentionBackend
from trainer.ops.attention.kernels import GROUPS_ON_CPU, has_torch_flash, repeat_groups
from trainer.ops.attention.tiled import Tiling, tiled_attention
from trainer.ops.attention.tiles import Tile, whole_tiles
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX

if TYPE_CHECKING:
    from trainer.data.samples.document_places import Documents


@dataclass(frozen=True)
class AttentionCore:
    """Settings of one layer's attention.

    Attributes:
        layer: its number in the whole model.
        dropout: share of the attention weights that is dropped if the pass has randomness.
        axes: the axes along which the layer is divided.
        backend: the attention kernels.
        kernels: the kernel registry; attention with dropout uses its softmax.
    """

    layer: int
    dropout: float
    axes: ParallelAxes
    backend: AttentionBackend
    kernels: Kernels = Kernels()


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forward_pass: ForwardPass, core: AttentionCore
) -> torch.Tensor:
    """Context [B, A/t, S, D] of causal attention.

    Each query [B, A/t, S, D] attends to keys and values [B, G/t, S, D] up to its position.

    With ``forward_pass.documents`` a query attends to its own document only. Rank r of tp holds the query heads from
    r x A/t on. Collective: all cp ranks.
    """
    cp = core.axes.cp
    documents = forward_pass.documents
    randomness = forward_pass.randomness if core.dropout > 0.0 else None
    first_head = core.axes.tp.rank * query.shape[1]
    if cp.size > 1 and cp.communication == "p2p":
        if randomness is not None:
            raise ValueError("ring attention computes its scores in parts, and has no dropout on them")
        return ring_attention(query, key, value, documents, cp, core.backend.kernel)
    if cp.size > 1:
        query, key, value = divide_heads(query, key, value, cp)
        first_head += cp.rank * query.shape[1]
    tiling = _tiling(documents, query.shape[2])
    if randomness is not None:
        context = _attend_with_dropout(query, key, value, tiling, documents, _Dropout(core, randomness, first_head))
    elif core.backend.name == "fused" and len(tiling.tiles) == 1:
        context = _causal_attention(query, key, value)
    else:
        context = tiled_attention(query, key, value, tiling, core.backend.kernel)
    return divide_sequence(context, cp) if cp.size > 1 else context


def _tiling(documents: Documents | None, length: int) -> Tiling:
    if documents is None:
        return Tiling(whole_tiles(length, None))
    return documents.once(("whole", length), lambda: Tiling(whole_tiles(length, documents.bounds)))


@dataclass(frozen=True)
class _Dropout:
    """The dropout masks of one layer and micro-batch."""

    core: AttentionCore
    randomness: MicroBatchRandomness
    first_head: int
    """Number of this rank's first head in the whole model."""

    def mask(self, query: torch.Tensor) -> torch.Tensor:
        """[B, A/t, S, S], True if a weight is kept."""
        batch, heads, length, _ = query.shape
        streams = [
            self.randomness.dropout_generator(query.device, "attention", self.core.layer, part=head)
            for head in range(self.first_head, self.first_head + heads)
        ]
        return torch.stack([draw_mask((batch, length, length), self.core.dropout, stream) for stream in streams], dim=1)


def _attend_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiling: Tiling,
    documents: Documents | None,
    dropout: _Dropout,
) -> torch.Tensor:
    # Unfused, because no fused kernel takes its mask from our random streams, and a mask must not depend on the layout:
    # each head of the whole model has its own stream.
    kept = dropout.mask(query)
    if documents is None or len(tiling.tiles) == 1:
        return _drop_and_attend(query, key, value, kept, dropout.core)
    length = query.shape[2]
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
    grouped = (query * head_dim**-0.5).reshape(batch, groups, -1, length, head_dim)  # [B, G/t, R, S, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    if unseen is None:
        shares = core.kernels[SCALED_CAUSAL_SOFTMAX](scores, 1.0)
    else:
        shares = core.kernels[SCALED_MASKED_SOFTMAX](scores.flatten(1, 2), unseen, 1.0).view(scores.shape)
    shares = apply_mask(shares, kept.view(shares.shape), core.dropout)
    return (shares @ value.unsqueeze(2)).flatten(1, 2)


def _causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # Memory is linear in S if torch has a fused kernel: on CPUs, and on GPUs since Volta (V100).
    if query.shape[1] == key.shape[1]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    if _has_grouped_kernel(query):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    copies = query.shape[1] // key.shape[1]
    key, value = repeat_groups(key, copies), repeat_groups(value, copies)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _has_grouped_kernel(query: torch.Tensor) -> bool:
    if query.is_cpu:
        return GROUPS_ON_CPU
    # The other kernels would fall back to S x S scores.
    return query.is_cuda and has_torch_flash(query.dtype, query.shape[-1], query.device)
