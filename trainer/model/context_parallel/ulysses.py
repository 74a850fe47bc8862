"""DeepSpeed-Ulysses: attention with the heads divided over cp instead of the sequence.

Legend: S sequence, B micro-batch, A heads, G query groups, D width of a query or key head, V of a value head; ``/c`` =
divided over cp; W = (A D + G D + G V)/c channels of the heads of one rank.
Jacobs et al. 2023 (arXiv:2309.14509), section 3.1. Outside attention, rank i holds the i-th c-th of every sequence;
inside, the i-th c-th of the heads. One all-to-all takes queries, keys and values there together, a second takes the
result back; backward makes the same two in reverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.model.context_parallel.axis import ContextParallel
from trainer.ops.attention.interface import repeat_groups, sum_copies


class _DivideHeads(torch.autograd.Function):
    """See divide_heads."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: ContextParallel
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.cp, ctx.groups = cp, key.shape[1]
        # The fewest copies that make the groups a multiple of the ranks; the heads are a multiple of both already.
        copies = cp.size // math.gcd(key.shape[1], cp.size)
        heads = query, repeat_groups(key, copies), repeat_groups(value, copies)
        shapes = [(part.shape[1] // cp.size, part.shape[3]) for part in heads]
        query, key, value = _unpack(_swap(_pack(heads, cp.size), cp).flatten(0, 1), shapes)
        return query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor, grad_value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        grads = grad_query, grad_key, grad_value
        whole = torch.cat([_sequence_first(grad).flatten(2) for grad in grads], dim=2)  # [S, B, W]
        parts = _swap(_divided(whole, 0, ctx.cp.size), ctx.cp)  # [c, S/c, B, W]
        shapes = [(grad.shape[1], grad.shape[3]) for grad in grads]
        query, key, value = map(_join, _unpack(parts, shapes))
        return query, sum_copies(key, ctx.groups), sum_copies(value, ctx.groups), None


class _DivideSequence(torch.autograd.Function):
    """See divide_sequence."""

    @staticmethod
    def forward(ctx: Any, context: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
        ctx.cp = cp
        return _join(_swap(_divided(_sequence_first(context), 0, cp.size), cp))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = _divided(_sequence_first(grad_output), 2, ctx.cp.size)  # [S/c, B, c, A/c, D]
        return _swap(parts.permute(2, 0, 1, 3, 4), ctx.cp).flatten(0, 1).permute(1, 2, 0, 3), None


def _sequence_first(heads: torch.Tensor) -> torch.Tensor:
    """[S, B, A, D] from [B, A, S, D]."""
    return heads.permute(2, 0, 1, 3)


def _divided(tensor: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """A view with ``dim`` split into ``parts`` and the size of a part."""
    return tensor.view(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1 :])


def _pack(heads: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """[c, S/c, B, W]: the heads for each rank."""
    parts = [_divided(_sequence_first(part), 2, size).flatten(3) for part in heads]
    return torch.cat(parts, dim=3).permute(2, 0, 1, 3)


def _unpack(packed: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Views [..., heads, width] of [..., W], for the numbers of heads and the widths ``shapes``."""
    parts = torch.split(packed, [heads * width for heads, width in shapes], dim=-1)
    return [part.view(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]


def _swap(parts: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """Send part i of dim 0 to rank i, and receive one from each.

    Collective: all cp ranks.
    """
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=cp.group)
    return received


def _join(parts: torch.Tensor) -> torch.Tensor:
    """[B, A, S/c, D], in the memory order [S/c, B, A, D], from [c, S/c, B, A/c, D]."""
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3)


def divide_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide query [B, A, S/c, D], key [B, G, S/c, D] and value [B, G, S/c, V] by heads: [B, A/c or G/c, S, D or V].

    If c does not divide the groups, key and value are repeated as few times as possible, and their gradients summed:
    with one group and two ranks, both ranks get a copy. Collective: all cp ranks.
    """
    if query.shape[1] % cp.size:
        raise ValueError(f"{query.shape[1]} attention heads cannot be divided over {cp.size} context-parallel ranks")
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _DivideHeads.apply(query, key, value, cp)  # type: ignore[no-untyped-call]
    return heads


def divide_sequence(context: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """[B, A, S/c, D] from [B, A/c, S, D]. Collective: all cp ranks."""
    divided: torch.Tensor = _DivideSequence.apply(context, cp)  # type: ignore[no-untyped-call]
    return divided
