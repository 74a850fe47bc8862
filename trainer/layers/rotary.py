"""Rotary position embedding, and the cutting of a packed query-key-value tensor into heads that goes with it.

Legend: S sequence, B micro-batch, G query groups, R = A/G queries per group, D head width; ``/t`` = divided over tp.
Su et al. 2021 (arXiv:2104.09864), equation 34, in the half-split pairing (channel i with i + rotated/2) of GPT-NeoX,
Megatron-LM and Hugging Face's Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of the rotation angles, each [S, 1, 1, 1, rotated/2], or [S, B, 1, 1, rotated/2] where each
    sample has positions of its own.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, length: int, rotated: int, base: float, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """The table of the first ``length`` positions for the first ``rotated`` channels of each head.

        The angles are float64 products before they are rounded to ``dtype``.
        """
        channel = torch.arange(0, rotated, 2, dtype=torch.float64)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), base ** (-channel / rotated))
        angles = angles.view(length, 1, 1, 1, rotated // 2)
        return cls(angles.cos().to(device, dtype), angles.sin().to(device, dtype))

    def first(self, length: int) -> RotaryTable:
        """The table of fewer positions (views).

        Raises:
            ValueError: the table is shorter than that.
        """
        if length > len(self.cos):
            raise ValueError(f"a sequence of {length} exceeds the {len(self.cos)} positions of the rotary table")
        return RotaryTable(self.cos[:length], self.sin[:length])

    def at(self, positions: torch.Tensor) -> RotaryTable:
        """The table of ``positions`` [S, B], none of which is beyond this one."""
        return RotaryTable(self.cos[positions].squeeze(2), self.sin[positions].squeeze(2))


class _SplitHeads(torch.autograd.Function):
    """One buffer in, three out; the gradient is assembled in one buffer too, instead of cut and joined by autograd."""

    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, queries_per_group: int, head_dim: int, rotary: RotaryTable | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.rotary, ctx.queries_per_group = rotary, queries_per_group
        heads = packed.view(*packed.shape[:2], -1, queries_per_group + 2, head_dim)  # [S, B, G/t, R+2, D]
        if rotary is not None:
            _rotate_(heads[..., :-1, :], rotary)
        query = heads[..., :-2, :].flatten(2, 3)  # [S, B, A/t, D], a copy only with several queries per group
        return query.permute(1, 2, 0, 3), heads[..., -2, :].permute(1, 2, 0, 3), heads[..., -1, :].permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor, grad_value: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        query, key, value = (grad.permute(2, 0, 1, 3) for grad in (grad_query, grad_key, grad_value))
        length, batch, groups, head_dim = key.shape
        query = query.reshape(length, batch, groups, ctx.queries_per_group, head_dim)
        grad = query.new_empty(length, batch, groups, ctx.queries_per_group + 2, head_dim)
        if ctx.rotary is None:
            grad[..., :-2, :] = query
            grad[..., -2, :] = key
        else:
            _rotate_back_into(grad[..., :-2, :], query, ctx.rotary)
            _rotate_back_into(grad[..., -2:-1, :], key.unsqueeze(3), ctx.rotary)
        grad[..., -1, :] = value
        return grad.flatten(2), None, None, None


def _rotate_(heads: torch.Tensor, rotary: RotaryTable) -> None:
    half = rotary.cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = (first * rotary.cos).addcmul_(second, rotary.sin, value=-1)
    second.mul_(rotary.cos).addcmul_(first, rotary.sin)
    first.copy_(turned)


def _rotate_back_into(target: torch.Tensor, heads: torch.Tensor, rotary: RotaryTable) -> None:
    half = rotary.cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    torch.mul(first, rotary.cos, out=target[..., :half]).addcmul_(second, rotary.sin)
    torch.mul(second, rotary.cos, out=target[..., half : 2 * half]).addcmul_(first, rotary.sin, value=-1)
    target[..., 2 * half :] = heads[..., 2 * half :]


def split_heads(
    packed: torch.Tensor, queries_per_group: int, head_dim: int, rotary: RotaryTable | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [B, A/t, S, D], key and value [B, G/t, S, D] from [S, B, G/t * (R+2) * D], rotated if a table is given.

    ``packed`` holds each query group's queries, its key and its value in turn. It is consumed: the results are views of
    it where they can be, and the rotation is done in place.
    """
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _SplitHeads.apply(  # type: ignore[no-untyped-call]
        packed, queries_per_group, head_dim, rotary
    )
    return heads
