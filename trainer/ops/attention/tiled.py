"""Attention by tiles of the score matrix: one layer's kernel, the tiles of undivided sequences, and sinks.

Legend: S sequence, B micro-batch, A heads, G query groups, Q queries, K keys, D width of a query or key head, V of a
value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer.ops.attention.interface import (
    AttentionKernel,
    Gradients,
    PackedKernel,
    Packing,
    empty_heads,
    precise,
)
from trainer.ops.attention.kept_weights import KeptWeights
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import Tile
from trainer.ops.attention.unfused import Unfused


@dataclass(frozen=True)
class TileAttention:
    """A kernel with the settings of a layer, and the layer's dropout.

    Attributes:
        kernel: computes a tile without dropout. With dropout plain torch does, because no fused kernel takes its mask
            from our random streams.
        settings: settings of the layer.
        weights: dropout over all queries and keys of the tiles; None: no dropout.
    """

    kernel: AttentionKernel
    settings: AttentionSettings
    weights: KeptWeights | None = None
    _unfused: Unfused = field(default_factory=Unfused)

    @property
    def packed(self) -> PackedKernel | None:
        """The kernel if it takes packed documents in one call."""
        return self.kernel if self.weights is None and isinstance(self.kernel, PackedKernel) else None

    def forward(
        self, tile: Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of a tile, from the tile's queries, keys and values."""
        if self.weights is None:
            return self.kernel.forward(query, key, value, settings=self.settings, band=tile.band)
        weights = self.weights.of(tile)
        return self._unfused.forward(query, key, value, settings=self.settings, band=tile.band, weights=weights)

    def backward(self, tile: Tile, *tensors: torch.Tensor) -> Gradients:
        """Gradients of a tile's query, key and value, from the tile's slices of a backward's arguments."""
        if self.weights is None:
            return self.kernel.backward(*tensors, settings=self.settings, band=tile.band)
        weights = self.weights.of(tile)
        return self._unfused.backward(*tensors, settings=self.settings, band=tile.band, weights=weights)

    def backward_from_whole(
        self,
        tile: Tile,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
    ) -> Gradients:
        """Gradients of a tile's slices of query, key and value, from the whole tensors."""
        at, keys = tile.queries, tile.keys
        return self.backward(tile, grad_output[at], query[at], key[keys], value[keys], output[at], log_sum_exp[at])


class Tiling:
    """Ordered tiles with each query in exactly one tile, and no key in two.

    Holds the packing that kernels read. All layers and recomputations of a micro-batch with the same settings share
    one Tiling.
    """

    def __init__(self, tiles: tuple[Tile, ...]) -> None:
        self.tiles = tiles
        self._packing: Packing | None = None

    def packing(self, query: torch.Tensor) -> Packing:
        """The tiles as packed documents for queries [B, A, S, D] of this micro-batch."""
        if self._packing is None:
            self._packing = Packing.build(self.tiles, query.shape[0], query.shape[2], query.device)
        return self._packing

    def forward(
        self, attention: TileAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output [B, A, Q, V] and log-sum-exp [B, A, Q].

        Args:
            attention: computes a tile.
            query: [B, A, Q, D].
            key: [B, G, K, D].
            value: [B, G, K, V].
        """
        if self._is_whole(key):
            return attention.forward(self.tiles[0], query, key, value)
        if attention.packed is not None and len(self.tiles) > 1:
            return attention.packed.forward_packed(self.packing(query), query, key, value, settings=attention.settings)
        output = empty_heads(query, query.dtype, value.shape[-1])
        log_sum_exp = query.new_empty(query.shape[:3], dtype=precise(query.dtype))
        for tile in self.tiles:
            at, keys = tile.queries, tile.keys
            output[at], log_sum_exp[at] = attention.forward(tile, query[at], key[keys], value[keys])
        return output, log_sum_exp

    def backward(self, attention: TileAttention, *tensors: torch.Tensor) -> Gradients:
        """Compute the gradients of query, key and value.

        Args:
            attention: computes a tile.
            tensors: arguments of a kernel's backward.
        """
        key = tensors[2]
        if self._is_whole(key):
            return attention.backward(self.tiles[0], *tensors)
        if attention.packed is not None and len(self.tiles) > 1:
            return attention.packed.backward_packed(self.packing(tensors[1]), *tensors, settings=attention.settings)
        grads = tuple(empty_heads(heads, heads.dtype) for heads in tensors[1:4])
        if len(self.tiles) == 1:
            # The only tile leaves out keys, which lie before all windows.
            for grad in grads[1:]:
                grad.zero_()
        for tile in self.tiles:
            at, keys = tile.queries, tile.keys
            grads[0][at], grads[1][keys], grads[2][keys] = attention.backward_from_whole(tile, *tensors)
        return grads[0], grads[1], grads[2]

    def _is_whole(self, key: torch.Tensor) -> bool:
        """True if the only tile has all keys; it always has all queries."""
        return len(self.tiles) == 1 and self.tiles[0].key == (0, key.shape[2])


def add_sinks_(output: torch.Tensor, log_sum_exp: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let each head's sink take part in the softmax, in place: as one more key, with the value 0.

    Args:
        output: [B, A, Q, V] of attention over all keys.
        log_sum_exp: [B, A, Q] of that attention.
        sinks: logits [A] (gpt-oss, arXiv:2508.10925, section 2.3; Xiao et al. 2023, arXiv:2309.17453).
    """
    both = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None])
    output.mul_((log_sum_exp - both).exp_().unsqueeze(-1))
    log_sum_exp.copy_(both)


def grad_sinks(
    grad_output: torch.Tensor, output: torch.Tensor, log_sum_exp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Gradient [A] of the sinks, from an output and a log-sum-exp that contain them."""
    along = (grad_output.to(log_sum_exp.dtype) * output).sum(-1)  # [B, A, Q]
    shares = (sinks.to(log_sum_exp.dtype)[:, None] - log_sum_exp).exp_()
    return shares.mul_(along).sum((0, 2)).neg_().to(sinks.dtype)


class _TiledAttention(torch.autograd.Function):
    """See tiled_attention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        tiling: Tiling,
        attention: TileAttention,
    ) -> torch.Tensor:
        ctx.tiling, ctx.attention = tiling, attention
        output, log_sum_exp = tiling.forward(attention, query, key, value)
        if sinks is not None:
            add_sinks_(output, log_sum_exp, sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, output, log_sum_exp, sinks = ctx.saved_tensors
        from_sinks = None if sinks is None else grad_sinks(grad_output, output, log_sum_exp, sinks)
        grads = ctx.tiling.backward(ctx.attention, grad_output, *tensors, output, log_sum_exp)
        return *grads, from_sinks, None, None


def tiled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiling: Tiling,
    attention: TileAttention,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of undivided sequences. No communication.

    Args:
        query: [B, A, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, V].
        tiling: tiles of ``trainer.ops.attention.tiles.whole_tiles``.
        attention: computes a tile.
        sinks: logits [A] that take part in each head's softmax without a value; None: no sinks.

    Returns:
        [B, A, Q, V].
    """
    output: torch.Tensor = _TiledAttention.apply(query, key, value, sinks, tiling, attention)  # type: ignore[no-untyped-call]
    return output
