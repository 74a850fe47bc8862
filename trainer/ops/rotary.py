"""Rotary position embedding, fused with the split of a packed query-key-value tensor into heads.

Legend: S sequence, B micro-batch, G query groups, R queries per group, A = G*R, D head width.
Su et al. 2021 (arXiv:2104.09864), equation 34, in the half-split pairing (channel i with i + rotated/2) of GPT-NeoX,
Megatron-LM and Hugging Face's Llama, or interleaved (2i with 2i + 1) as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainer.ops.autograd import differentiable_once
from trainer.ops.operation import Implementation, Operation

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rope = Callable[..., Heads]


@dataclass(frozen=True)
class _Kernels:
    """Functions of one implementation.

    Attributes:
        split_: (heads [S, B, G, R+2, D], cos, sin, interleaved) -> queries [S, B, A, D]. Rotates keys in place, and
            queries too if there is one per group; otherwise the rotated queries are written to a new tensor.
        join: (gradients of query, key and value in the layout of forward's results, cos, sin, interleaved) -> gradient
            of the heads.
    """

    split_: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, bool], torch.Tensor]
    join: Callable[..., torch.Tensor]


class _Rope(torch.autograd.Function):
    """Split and rotation of one buffer; backward writes the gradient into one buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        interleaved: bool,
        kernels: _Kernels,
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernels = interleaved, kernels
        query = kernels.split_(heads, cos, sin, interleaved)
        return query.permute(1, 2, 0, 3), heads[..., -2, :].permute(1, 2, 0, 3), heads[..., -1, :].permute(1, 2, 0, 3)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.kernels.join(*grads, *ctx.saved_tensors, ctx.interleaved), None, None, None, None


def _rope(kernels: _Kernels) -> Rope:
    def rope(
        packed: torch.Tensor,
        queries_per_group: int,
        head_dim: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        interleaved: bool = False,
    ) -> Heads:
        """Split a packed tensor into heads, and rotate queries and keys.

        Args:
            packed: [S, B, G * (R+2) * D], per query group its queries, its key and its value. Consumed: the rotation
                is in place, and the results are views of ``packed`` where possible.
            queries_per_group: R.
            head_dim: D.
            cos: cosines [S, 1, 1, 1, rotated/2], or [S, B, 1, 1, rotated/2] with positions per sample; None: no
                rotation.
            sin: sines, as ``cos``.
            interleaved: True if the two channels of a pair are neighbours.

        Returns:
            Query [B, A, S, D], key [B, G, S, D] and value [B, G, S, D].
        """
        heads = _by_head(packed, queries_per_group, head_dim)
        if heads.stride(-1) != 1:
            heads = heads.contiguous()
        found: Heads = _Rope.apply(heads, cos, sin, interleaved, kernels)  # type: ignore[no-untyped-call]
        return found

    return rope


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first channels of heads [S, B, A, D], in new memory; for heads that are not packed.

    ``cos`` and ``sin`` as in the operation.
    """
    rotated: torch.Tensor = _Rotate.apply(heads, cos.squeeze(3), sin.squeeze(3), interleaved)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """See rotate. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        # Forward by the negative angle is backward by the angle.
        target = torch.empty_like(heads, memory_format=torch.contiguous_format)
        _rotate_back_into(target, heads, cos, -sin, interleaved)
        return target

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        target = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _rotate_back_into(target, grad, cos, sin, ctx.interleaved)
        return target, None, None, None


def _reference_split_(
    heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    if cos is not None and sin is not None:
        _rotate_(heads[..., :-1, :], cos, sin, interleaved)
    return heads[..., :-2, :].flatten(2, 3)  # a copy only with several queries per group


def _reference_join(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> torch.Tensor:
    query, key, value = (grad.permute(2, 0, 1, 3) for grad in (grad_query, grad_key, grad_value))
    length, batch, groups, head_dim = key.shape
    query = query.reshape(length, batch, groups, query.shape[2] // groups, head_dim)
    grad = query.new_empty(length, batch, groups, query.shape[3] + 2, head_dim)
    if cos is None or sin is None:
        grad[..., :-2, :] = query
        grad[..., -2, :] = key
    else:
        _rotate_back_into(grad[..., :-2, :], query, cos, sin, interleaved)
        _rotate_back_into(grad[..., -2:-1, :], key.unsqueeze(3), cos, sin, interleaved)
    grad[..., -1, :] = value
    return grad


def _by_head(packed: torch.Tensor, queries_per_group: int, head_dim: int) -> torch.Tensor:
    """View [S, B, G, R+2, D] of the packed tensor."""
    groups = packed.shape[-1] // ((queries_per_group + 2) * head_dim)
    return packed.view(*packed.shape[:2], groups, queries_per_group + 2, head_dim)


def _pairs(heads: torch.Tensor, cos: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second channels of all pairs."""
    half = cos.shape[-1]
    if interleaved:
        return heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    return heads[..., :half], heads[..., half : 2 * half]


def _rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    first, second = _pairs(heads, cos, interleaved)
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


def _rotate_back_into(
    target: torch.Tensor, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    first, second = _pairs(heads, cos, interleaved)
    target_first, target_second = _pairs(target, cos, interleaved)
    target_first.copy_(first).mul_(cos).addcmul_(second, sin)
    target_second.copy_(second).mul_(cos).addcmul_(first, sin, value=-1)
    rotated = 2 * cos.shape[-1]
    target[..., rotated:] = heads[..., rotated:]


def _native_split_(
    heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    if cos is not None:
        # Custom ops do not report in-place changes to autograd.
        torch.autograd.graph.increment_version(heads)
    if heads.shape[-2] > 3:
        queries: torch.Tensor = torch.ops.llmctl.rope_take_queries_(heads, cos, sin, interleaved)
        return queries
    if cos is not None:
        torch.ops.llmctl.rope_(heads, cos, sin, interleaved)
    return heads[..., 0, :]


def _native_join(*grads_and_angles: Any) -> torch.Tensor:
    joined: torch.Tensor = torch.ops.llmctl.rope_join(*grads_and_angles)
    return joined


def _example(
    shape: tuple[int, int, int, int, int, int],
    by_sample: bool,
    interleaved: bool,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Any, ...]:
    length, batch, groups, queries, head_dim, rotated = shape
    packed = torch.randn((length, batch, groups * (queries + 2) * head_dim), generator=generator)
    angles = torch.randn((length, batch if by_sample else 1, 1, 1, rotated // 2), generator=generator)
    tables = (angles.cos().to(device, dtype), angles.sin().to(device, dtype)) if rotated else (None, None)
    return packed.to(device, dtype).requires_grad_(), queries, head_dim, *tables, interleaved


ROPE: Operation[Rope] = Operation(
    "rope",
    {
        "native": Implementation(_rope(_Kernels(_native_split_, _native_join))),
        "reference": Implementation(_rope(_Kernels(_reference_split_, _reference_join))),
    },
    [
        partial(_example, (5, 2, 3, 2, 10, 8), False, True),
        partial(_example, (3, 2, 2, 4, 64, 0), False, False),
        # Heads of models: one query per group, which is rotated in place, and several.
        partial(_example, (9, 2, 4, 1, 128, 128), False, False),
        partial(_example, (9, 2, 2, 4, 128, 64), True, False),
    ],
)
