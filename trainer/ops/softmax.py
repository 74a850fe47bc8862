"""Softmax of scaled attention scores under a causal mask or a mask tensor.

Legend: B micro-batch, A heads, Q queries, K keys.
Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Probabilities are 0 for masked keys, and for all keys of a query
that sees no key. Sums are float32 for 16-bit scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.ops.autograd import differentiable_once, with_gradient
from trainer.ops.operation import Implementation, Operation

MaskedSoftmax = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
CausalSoftmax = Callable[[torch.Tensor, float], torch.Tensor]


def _reference_masked(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, A, Q, K] -> [B, A, Q, K].

    ``mask`` is True for masked keys and has the shape of the scores; any dim but K may have size 1 and is broadcast.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    hidden = (scores.to(wide) * scale).masked_fill(mask, -torch.inf)
    sees_nothing = mask.all(-1, keepdim=True)
    return torch.softmax(hidden, -1).masked_fill(sees_nothing, 0.0).to(scores.dtype)


def _reference_causal(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """[..., Q, K] -> [..., Q, K] under the causal mask.

    The last query sees all keys, and each query one key more than the query before.
    """
    queries, keys = scores.shape[-2:]
    wide = torch.promote_types(scores.dtype, torch.float32)
    future = _future(scores)
    shares = torch.softmax((scores.to(wide) * scale).masked_fill(future, -torch.inf), -1)
    if queries > keys:
        shares = shares.masked_fill(future.all(-1, keepdim=True), 0.0)
    return shares.to(scores.dtype)


def _native_masked(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    shares: torch.Tensor = _scaled_masked_softmax(scores, mask, scale)
    return shares


def _native_causal(scores: torch.Tensor, scale: float) -> torch.Tensor:
    shares: torch.Tensor = _scaled_causal_softmax(scores, scale)
    return shares


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[-1]


@differentiable_once
def _masked_backward(ctx: Any, grad_shares: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    # Into a new tensor: other code may still read the gradient that autograd passes in.
    (shares,) = ctx.saved_tensors
    return torch.ops.llmctl.scaled_softmax_backward(grad_shares, shares, ctx.scale, False), None, None


@differentiable_once
def _causal_backward(ctx: Any, grad_shares: torch.Tensor) -> tuple[torch.Tensor, None]:
    (shares,) = ctx.saved_tensors
    return torch.ops.llmctl.scaled_softmax_backward(grad_shares, shares, ctx.scale, True), None


_scaled_masked_softmax = with_gradient("scaled_masked_softmax", _keep, _masked_backward)
_scaled_causal_softmax = with_gradient("scaled_causal_softmax", _keep, _causal_backward)


def _scores(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def _masked_example(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, float]:
    batch, _, queries, keys = shape
    mask = torch.rand((batch, 1, queries, keys), generator=generator) < 0.4
    mask[-1, 0, 2] = True
    return _scores(shape, device, dtype, generator), mask.to(device), 0.5


def _causal_example(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, float]:
    return _scores(shape, device, dtype, generator), 0.5


def _future(scores: torch.Tensor) -> torch.Tensor:
    """Causal mask [Q, K], True for keys after the query."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)


# Odd sizes; rows of whole vectors; rows that are shared by a block of threads.
_SHAPES = ((2, 3, 5, 7), (1, 2, 64, 64), (1, 1, 5, 4104))

SCALED_MASKED_SOFTMAX: Operation[MaskedSoftmax] = Operation(
    "scaled_masked_softmax",
    {
        "native": Implementation(_native_masked),
        "reference": Implementation(_reference_masked),
    },
    [partial(_masked_example, shape) for shape in _SHAPES],
)
SCALED_CAUSAL_SOFTMAX: Operation[CausalSoftmax] = Operation(
    "scaled_causal_softmax",
    {
        "native": Implementation(_native_causal),
        "reference": Implementation(_reference_causal),
    },
    [partial(_causal_example, shape) for shape in _SHAPES],
)
