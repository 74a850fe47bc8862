"""Permutation of tokens to their experts, and weighted sum of expert outputs.

Legend: T tokens, K experts chosen per token, P <= T*K choices that were not dropped, H hidden.
Each sum looks up a token's rows and adds the K choices in order, without atomic additions: the order of addition is the
same on every device. The permutation is torch's index_select, which is already optimal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainer.ops.autograd import differentiable_once
from trainer.ops.operation import Implementation, Operation

Permute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Unpermute = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _CombineKernels:
    """Functions of one implementation.

    Attributes:
        combine: see ``combine``.
        combine_backward: (gradients of the tokens [T, H], rows, choices, weights) -> gradients of the rows [P, H] and
            of the weights [T, K]; the weight of a dropped choice has gradient 0.
    """

    combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    combine_backward: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
    ]


def combine(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sum over k of weights[t, k] * rows[places[t, k]], [T, H].

    Args:
        rows: [P, H].
        places: int64 [T, K]; P for a dropped choice.
        weights: [T, K], float32, or float64 for float64 rows; None: all weights are 1.
    """
    total = rows.new_zeros((len(places), rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    if not len(rows):
        return total.to(rows.dtype)
    is_there = places < len(rows)
    shares = is_there.to(total.dtype) if weights is None else torch.where(is_there, weights, 0.0)
    existing = places.clamp(max=len(rows) - 1)
    for place in range(places.shape[1]):
        chosen = rows.index_select(0, existing[:, place])
        if len(rows) < places.numel():
            # The row that stands in for a dropped choice may hold infinities, and 0 * inf is NaN.
            chosen.masked_fill_(~is_there[:, place, None], 0.0)
        total.addcmul_(chosen, shares[:, place, None])
    return total.to(rows.dtype)


def _combine_backward(
    grad_tokens: torch.Tensor, rows: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_rows = grad_tokens.index_select(0, choices // weights.shape[1])
    values = grad_rows.to(weights.dtype)
    grad_weights = torch.zeros_like(weights).flatten()
    grad_weights[choices] = (values * rows).sum(1)
    return values.mul_(weights.flatten()[choices].unsqueeze(1)).to(rows.dtype), grad_weights.view_as(weights)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, choices: torch.Tensor, places: torch.Tensor, kernels: _CombineKernels
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.kernels = kernels
        return tokens.index_select(0, choices // places.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ctx.kernels.combine(grad_rows, places, None), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        choices: torch.Tensor,
        places: torch.Tensor,
        kernels: _CombineKernels,
    ) -> torch.Tensor:
        # Without weights, backward does not need the rows.
        ctx.save_for_backward(None if weights is None else rows, choices, weights)
        ctx.kernels, ctx.per_token = kernels, places.shape[1]
        return kernels.combine(rows, places, weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, choices, weights = ctx.saved_tensors
        if weights is None:
            return grad_tokens.index_select(0, choices // ctx.per_token), None, None, None, None
        return *ctx.kernels.combine_backward(grad_tokens, rows, choices, weights), None, None, None


def _permute(kernels: _CombineKernels) -> Permute:
    def permute(tokens: torch.Tensor, choices: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Rows [P, H] of the chosen tokens in the order of the experts.

        Args:
            tokens: [T, H].
            choices: int64 [P], numbers t * K + k of the choices that were not dropped, in the order of the rows.
            places: int64 [T, K], index of each choice in ``choices``; P for a dropped choice.
        """
        rows: torch.Tensor = _Permute.apply(tokens, choices, places, kernels)  # type: ignore[no-untyped-call]
        return rows

    return permute


def _unpermute(kernels: _CombineKernels) -> Unpermute:
    def unpermute(
        rows: torch.Tensor, weights: torch.Tensor | None, choices: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [T, H]: the weighted sum of each token's expert outputs.

        Args:
            rows: expert outputs [P, H], in the order of ``choices``.
            weights: [T, K], float32, or float64 for float64 rows; None: all weights are 1.
            choices: see ``permute``.
            places: see ``permute``.
        """
        tokens: torch.Tensor = _Unpermute.apply(rows, weights, choices, places, kernels)  # type: ignore[no-untyped-call]
        return tokens

    return unpermute


def _plain_permute(tokens: torch.Tensor, choices: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return tokens[choices // places.shape[1]]


def _small_permute(tokens: torch.Tensor, choices: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    # Backward of torch's indexing adds in any order and rounds each time. Two addends give the same sum in any order.
    if places.shape[1] <= 2:
        return _plain_permute(tokens, choices, places)
    rows: torch.Tensor = _Permute.apply(tokens, choices, places, _REFERENCE)  # type: ignore[no-untyped-call]
    return rows


def _native_combine(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    tokens: torch.Tensor = torch.ops.llmctl.moe_combine(rows, places, weights)
    return tokens


def _native_combine_backward(
    grad_tokens: torch.Tensor, rows: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor] = torch.ops.llmctl.moe_combine_backward(
        grad_tokens, rows, choices, weights
    )
    return gradients


def _routes(tokens: int, per_token: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ``choices`` and ``places`` of ``permute``, with one choice dropped."""
    count = tokens * per_token - 1
    choices = torch.randperm(tokens * per_token, generator=generator)[:count]
    ranks = torch.arange(count)
    places = torch.full((tokens * per_token,), count).index_copy(0, choices, ranks)
    return choices, places.view(tokens, per_token)


def _example(
    tokens: int, per_token: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    choices, places = _routes(tokens, per_token, generator)
    hidden = torch.randn((tokens, width), generator=generator).to(device, dtype).requires_grad_()
    return hidden, choices.to(device), places.to(device)


def _example_back(
    tokens: int, per_token: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    choices, places = _routes(tokens, per_token, generator)
    rows = torch.randn((len(choices), width), generator=generator).to(device, dtype).requires_grad_()
    weights = torch.rand((tokens, per_token), generator=generator)
    wide = weights.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
    return rows, wide, choices.to(device), places.to(device)


_REFERENCE, _NATIVE = (
    _CombineKernels(combine, _combine_backward),
    _CombineKernels(_native_combine, _native_combine_backward),
)
# Odd sizes; then whole vectors, and more experts per token than a kernel takes at once.
_SIZES = ((4, 2, 25), (9, 6, 4104))

MOE_PERMUTE: Operation[Permute] = Operation(
    "moe_permute",
    # Forward and backward on one core of an AMD EPYC, this kernel and torch's indexing: 32 x 2 x 128 float32 64 us and
    # 51 us, 64 x 2 x 128 bfloat16 60 us and 73 us.
    {
        "native": Implementation(_permute(_NATIVE), smallest={"cpu": 1 << 13}),
        "reference": Implementation(_permute(_REFERENCE)),
    },
    [partial(_example, *size) for size in _SIZES],
    small=_small_permute,
)
MOE_UNPERMUTE: Operation[Unpermute] = Operation(
    "moe_unpermute",
    {"native": Implementation(_unpermute(_NATIVE)), "reference": Implementation(_unpermute(_REFERENCE))},
    [partial(_example_back, *size) for size in _SIZES],
)
