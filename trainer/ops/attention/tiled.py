"""Attention of undivided sequences by tiles of the score matrix, and the kernel interface.

Legend: S sequence, B micro-batch, N = B x S tokens, A heads, G query groups, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.autograd.function import once_differentiable

from trainer.ops.attention.tiles import Tile

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionKernel(Protocol):
    """Attention of query [B, A, Q, D] over key and value [B, G, K, D].

    Scores are scaled by D^-0.5. Head a belongs to group a * G // A. ``causal`` requires Q = K: each query sees the keys
    up to its own position.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output [B, A, Q, D] and log-sum-exp [B, A, Q], at least float32."""

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        causal: bool,
    ) -> Gradients:
        """Compute the gradients of query, key and value.

        ``output`` and ``log_sum_exp`` may cover more keys than ``key``.
        """


@runtime_checkable
class PackedKernel(AttentionKernel, Protocol):
    """A kernel that takes packed documents in one call."""

    def forward_packed(
        self, packing: Packing, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``forward`` of causal tiles that cover all queries and keys in order."""

    def backward_packed(
        self,
        packing: Packing,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
    ) -> Gradients:
        """Compute ``backward`` of these tiles."""


@dataclass(frozen=True)
class Packing:
    """Documents packed one after another along the tokens of all samples."""

    starts: torch.Tensor
    """First token of each document, then the number of tokens, int32."""
    longest: int
    """Tokens of the longest document."""
    batch: int
    length: int

    @classmethod
    def build(cls, tiles: tuple[Tile, ...], batch: int, length: int, device: torch.device) -> Packing:
        """Pack the documents of ``tiles`` in ``batch`` samples."""
        starts = [
            sample * length + tile.query[0]
            for sample in range(batch)
            for tile in tiles
            if tile.sample in (None, sample)
        ]
        longest = max(stop - start for start, stop in (tile.query for tile in tiles))
        ends = torch.tensor([*starts, batch * length], dtype=torch.int32).to(device)
        return cls(ends, longest, batch, length)

    def tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """[N, A, D] from [B, A, S, D]."""
        return heads.transpose(1, 2).flatten(0, 1)

    def heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """View [B, A, S, D] of [N, A, D]."""
        return tokens.view(self.batch, self.length, *tokens.shape[1:]).transpose(1, 2)

    def by_token(self, log_sum_exp: torch.Tensor) -> torch.Tensor:
        """[A, N] from [B, A, S]."""
        return log_sum_exp.transpose(0, 1).flatten(1).contiguous()

    def by_sample(self, log_sum_exp: torch.Tensor) -> torch.Tensor:
        """View [B, A, S] of [A, N]."""
        return log_sum_exp.view(-1, self.batch, self.length).transpose(0, 1)


class Tiling:
    """Ordered causal tiles with each query and key in exactly one tile.

    Holds the packing that kernels read. All layers and recomputations of a micro-batch share one Tiling.
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
        self, kernel: AttentionKernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output [B, A, S, D] and log-sum-exp [B, A, S].

        Args:
            kernel: computes a tile.
            query: [B, A, S, D].
            key: [B, G, S, D].
            value: as ``key``.
        """
        if len(self.tiles) == 1:
            return kernel.forward(query, key, value, causal=True)
        if isinstance(kernel, PackedKernel):
            return kernel.forward_packed(self.packing(query), query, key, value)
        output = empty_heads(query, query.dtype)
        log_sum_exp = query.new_empty(query.shape[:3], dtype=precise(query.dtype))
        for tile in self.tiles:
            at, keys = tile.queries, tile.keys
            output[at], log_sum_exp[at] = kernel.forward(query[at], key[keys], value[keys], causal=True)
        return output, log_sum_exp

    def backward(self, kernel: AttentionKernel, *tensors: torch.Tensor) -> Gradients:
        """Compute the gradients of query, key and value.

        Args:
            kernel: computes a tile.
            tensors: arguments of a kernel's backward.
        """
        if len(self.tiles) == 1:
            return kernel.backward(*tensors, causal=True)
        if isinstance(kernel, PackedKernel):
            return kernel.backward_packed(self.packing(tensors[1]), *tensors)
        grads = tuple(empty_heads(heads, heads.dtype) for heads in tensors[1:4])
        for tile in self.tiles:
            at, keys = tile.queries, tile.keys
            grads[0][at], grads[1][keys], grads[2][keys] = tile_backward(kernel, tile, *tensors)
        return grads[0], grads[1], grads[2]


def tile_backward(
    kernel: AttentionKernel,
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
    return kernel.backward(
        grad_output[at], query[at], key[keys], value[keys], output[at], log_sum_exp[at], causal=tile.causal
    )


def precise(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over many scores."""
    return torch.promote_types(dtype, torch.float32)


def empty_heads(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Empty [B, A, S, D] in the memory order [S, B, A, D], as in the projections."""
    batch, number, length, width = heads.shape
    return heads.new_empty((length, batch, number, width), dtype=dtype).permute(1, 2, 0, 3)


class _TiledAttention(torch.autograd.Function):
    """See tiled_attention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiling: Tiling,
        kernel: AttentionKernel,
    ) -> torch.Tensor:
        ctx.tiling, ctx.kernel = tiling, kernel
        output, log_sum_exp = tiling.forward(kernel, query, key, value)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        return *ctx.tiling.backward(ctx.kernel, grad_output, *ctx.saved_tensors), None, None


def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiling: Tiling, kernel: AttentionKernel
) -> torch.Tensor:
    """Attention of undivided sequences. No communication.

    Args:
        query: [B, A, S, D].
        key: [B, G, S, D].
        value: as ``key``.
        tiling: tiles of ``trainer.ops.attention.tiles.whole_tiles``.
        kernel: computes a tile.

    Returns:
        [B, A, S, D].
    """
    output: torch.Tensor = _TiledAttention.apply(query, key, value, tiling, kernel)  # type: ignore[no-untyped-call]
    return output
