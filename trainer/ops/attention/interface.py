"""Interface of the attention kernels, and packed documents.

Legend: S sequence, B micro-batch, N = B x S tokens, A heads, G query groups, Q queries, K keys, D width of a query or
key head, V width of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import Band, Tile

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionKernel(Protocol):
    """Attention of query [B, A, Q, D] over key [B, G, K, D] and value [B, G, K, V].

    Head a belongs to group a * G // A. Scale and softcap come from ``settings``, the visible keys from ``band``, which
    shows each query at least one key.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, settings: AttentionSettings, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output [B, A, Q, V] and log-sum-exp [B, A, Q], at least float32."""

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        settings: AttentionSettings,
        band: Band,
    ) -> Gradients:
        """Compute the gradients of query, key and value.

        ``output`` and ``log_sum_exp`` may cover more keys than ``key``.
        """


@runtime_checkable
class PackedKernel(AttentionKernel, Protocol):
    """A kernel that takes packed documents in one call."""

    def forward_packed(
        self,
        packing: Packing,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        settings: AttentionSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``forward`` of square tiles that cover all queries and keys in order.

        Mask and window of each tile come from ``settings``.
        """

    def backward_packed(
        self,
        packing: Packing,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        settings: AttentionSettings,
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
        # Does not wait for the device: the driver has copied so few numbers before the call returns.
        ends = torch.tensor([*starts, batch * length], dtype=torch.int32).to(device, non_blocking=True)
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


def precise(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over many scores."""
    return torch.promote_types(dtype, torch.float32)


def empty_heads(heads: torch.Tensor, dtype: torch.dtype, width: int | None = None) -> torch.Tensor:
    """Empty [B, A, S, width or D] in the memory order [S, B, A, D], as in the projections."""
    batch, number, length, own = heads.shape
    return heads.new_empty((length, batch, number, width or own), dtype=dtype).permute(1, 2, 0, 3)


def repeat_groups(heads: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat keys or values [B, G, S, D] to [B, copies x G, S, D].

    The copies of a group are neighbours.
    """
    return heads if copies == 1 else heads.repeat_interleave(copies, dim=1)


def sum_copies(grad_heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the gradients of the copies to [B, G, S, D], in at least float32."""
    if grad_heads.shape[1] == groups:
        return grad_heads
    copies = grad_heads.view(grad_heads.shape[0], groups, -1, *grad_heads.shape[2:])
    return copies.sum(2, dtype=precise(grad_heads.dtype)).to(grad_heads.dtype)
