"""RMSNorm over the last dim, of one tensor or of a residual sum.

Legend: T any leading dims, H hidden. Statistics are float32 for 16-bit activations.
Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4. With ``adds_one`` the factor is 1 + weight, which is not rounded
to the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from trainer.ops.autograd import differentiable_once, with_gradient
from trainer.ops.operation import Implementation, Operation

Norm = Callable[..., torch.Tensor]
"""(hidden [T, H], weight [H], epsilon, adds_one = False) -> [T, H]."""
NormOfSum = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(hidden [T, H], residual [T, H], weight [H], epsilon, adds_one = False) -> the norm of the sum, and the sum."""


class _ReferenceRMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per token.

    Autograd of the separate torch operations would save every intermediate result.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, adds_one: bool) -> torch.Tensor:
        values = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        scale = norm.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        ctx.adds_one = adds_one
        normed: torch.Tensor = (values * scale).mul_(_factor(weight, scale.dtype, adds_one)).to(hidden.dtype)
        return normed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, scale = ctx.saved_tensors
        factor = _factor(weight, scale.dtype, ctx.adds_one)
        unit = hidden * scale
        gradient = grad_output.to(scale.dtype)
        products = (gradient * unit).reshape(scale.numel(), len(weight))
        # The norm does not depend on the length of its input: remove the gradient's component along the unit vector.
        along = (products @ factor).view(scale.shape).div_(len(weight))
        grad_hidden = (gradient * factor).addcmul_(unit, along, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), products.sum(0).to(weight.dtype), None, None


def _factor(weight: torch.Tensor, wide: torch.dtype, adds_one: bool) -> torch.Tensor:
    return weight.to(wide) + 1 if adds_one else weight.to(wide)


def _reference(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, adds_one: bool = False) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    normed: torch.Tensor = _ReferenceRMSNorm.apply(hidden, weight, epsilon, adds_one)  # type: ignore[no-untyped-call]
    return normed


def _torch(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, adds_one: bool = False) -> torch.Tensor:
    if adds_one:  # torch takes weights of the activations' dtype only
        return _reference(hidden, weight, epsilon, adds_one)
    return F.rms_norm(hidden, weight.shape, weight, epsilon)


def _native(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, adds_one: bool = False) -> torch.Tensor:
    normed: torch.Tensor = _rms_norm(hidden, weight, epsilon, adds_one)[0]
    return normed


def _of_sum(norm: Norm) -> NormOfSum:
    def norm_of_sum(
        hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, adds_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of the sum of two tensors [T, H], and the sum."""
        total = hidden + residual
        return norm(total, weight, epsilon, adds_one), total

    return norm_of_sum


def _native_of_sum(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, adds_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, total, _ = _add_rms_norm(hidden, residual, weight, epsilon, adds_one)
    return normed, total


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, weight, _, ctx.adds_one = inputs
    _, scale = output
    ctx.save_for_backward(hidden, weight, scale)
    ctx.mark_non_differentiable(scale)


@differentiable_once
def _backward(ctx: Any, grad_normed: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    grad_hidden, grad_weight = torch.ops.llmctl.rms_norm_backward(grad_normed, None, *ctx.saved_tensors, ctx.adds_one)
    return grad_hidden, grad_weight, None, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    _, total, scale = output
    ctx.save_for_backward(total, inputs[2], scale)
    ctx.adds_one = inputs[4]
    ctx.mark_non_differentiable(scale)
    # Unused gradients are None instead of zeros that backward would read.
    ctx.set_materialize_grads(False)


@differentiable_once
def _backward_of_add(
    ctx: Any, grad_normed: torch.Tensor | None, grad_sum: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    if grad_normed is None:
        return grad_sum, grad_sum, None, None, None
    grad_total, grad_weight = torch.ops.llmctl.rms_norm_backward(
        grad_normed, grad_sum, *ctx.saved_tensors, ctx.adds_one
    )
    return grad_total, grad_total, grad_weight, None, None


_rms_norm = with_gradient("rms_norm", _keep, _backward)
_add_rms_norm = with_gradient("add_rms_norm", _keep_sum, _backward_of_add)


def _example(tokens: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Any:
    hidden, weight = torch.randn((tokens, width), generator=generator), torch.randn(width, generator=generator)
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), 1e-5


def _example_of_sum(
    tokens: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Any:
    residual = torch.randn((tokens, width), generator=generator).to(device, dtype).requires_grad_()
    hidden, weight, epsilon = _example(tokens, width, device, dtype, generator)
    return hidden, residual, weight, epsilon


def _example_with_one(
    example: Callable[..., Any], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Any:
    return *example(3, 41, device, dtype, generator), True


# Rows of several warps, and several rows in each sum over rows.
_SIZES = ((3, 41), (9, 8200))

RMS_NORM: Operation[Norm] = Operation(
    "rms_norm",
    {
        "native": Implementation(_native),
        "torch": Implementation(_torch, ("cuda",)),
        "reference": Implementation(_reference),
    },
    [*(partial(_example, *size) for size in _SIZES), partial(_example_with_one, _example)],
)

ADD_RMS_NORM: Operation[NormOfSum] = Operation(
    "add_rms_norm",
    {
        "native": Implementation(_native_of_sum),
        "torch": Implementation(_of_sum(_torch), ("cuda",)),
        "reference": Implementation(_of_sum(_reference)),
    },
    [*(partial(_example_of_sum, *size) for size in _SIZES), partial(_example_with_one, _example_of_sum)],
)
"""Norm of a residual sum, and the sum, which is the next residual."""
