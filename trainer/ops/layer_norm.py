"""LayerNorm over the last dim. Statistics are float32 for 16-bit activations.

Legend: T any leading dims, H hidden.
Ba et al. 2016 (arXiv:1607.06450), equation 3. With ``adds_one`` the factor is 1 + weight, which is not rounded to the
activations' dtype.
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
"""(hidden [T, H], weight [H], bias [H], epsilon, adds_one = False) -> [T, H]."""


class _WithOne(torch.autograd.Function):
    """LayerNorm with the factor 1 + weight, computed in float32, that saves its input and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normed, mean, scale = torch.native_layer_norm(
            hidden.to(wide), weight.shape, weight.to(wide) + 1, bias.to(wide), epsilon
        )
        ctx.save_for_backward(hidden, weight, bias, mean, scale)
        return normed.to(hidden.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_normed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, mean, scale = ctx.saved_tensors
        wide = mean.dtype
        found = torch.ops.aten.native_layer_norm_backward(
            grad_normed.to(wide),
            hidden.to(wide),
            weight.shape,
            mean,
            scale,
            weight.to(wide) + 1,
            bias.to(wide),
            [True, True, True],
        )
        return *(gradient.to(hidden.dtype) for gradient in found), None


def _reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, adds_one: bool = False
) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    if adds_one:
        normed: torch.Tensor = _WithOne.apply(hidden, weight, bias, epsilon)  # type: ignore[no-untyped-call]
        return normed
    return F.layer_norm(hidden, weight.shape, weight, bias, epsilon)


def _native(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, adds_one: bool = False
) -> torch.Tensor:
    if adds_one:  # the kernel knows no such factor
        return _reference(hidden, weight, bias, epsilon, adds_one)
    normed: torch.Tensor = _layer_norm(hidden, weight, bias, epsilon)[0]
    return normed


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, _, _ = inputs
    _, mean, scale = output
    ctx.save_for_backward(hidden, weight, mean, scale)
    ctx.mark_non_differentiable(mean, scale)


@differentiable_once
def _backward(ctx: Any, grad_normed: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*torch.ops.llmctl.layer_norm_backward(grad_normed, *ctx.saved_tensors), None)


_layer_norm = with_gradient("layer_norm", _keep, _backward)


def _example(tokens: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Any:
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in ((tokens, width), (width,), (width,))
    )
    return hidden, weight, bias, 1e-5


LAYER_NORM: Operation[Norm] = Operation(
    "layer_norm",
    {
        # Forward and backward of 4096 x 1024 on one core of an AMD EPYC (Zen 4), this kernel and torch: bfloat16 4.5 ms
        # and 6.0 ms, float32 6.1 ms and 5.9 ms, float16 (4096 x 4096) 34 ms and 22 ms.
        "native": Implementation(_native, ("cpu",), (torch.bfloat16,), {"cpu": 1 << 19}),
        # The reference is already torch's fused operation, so there is no separate torch backend.
        "reference": Implementation(_reference),
    },
    [partial(_example, *size) for size in ((3, 41), (9, 8200))],
)
