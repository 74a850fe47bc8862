"""Feed-forward activations, gated or not, with a fused bias and weight per token.

Legend: T any leading dims, F feed-forward width; I = 2F (gates, then ups) for gated activations, F for others.
GeLU is the exact one, x * Phi(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), or its tanh approximation
(the same section). SwiGLU and GeGLU: Shazeer 2020 (arXiv:2002.05202), equation 6. Squared ReLU: So et al. 2021
(arXiv:2109.08668), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from trainer.ops.autograd import differentiable_once, with_gradient
from trainer.ops.operation import Implementation, Operation

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"]
Activate = Callable[..., torch.Tensor]
"""See ``_activate``."""

_NUMBERS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "squared_relu": 4}
"""Numbers of csrc/common/activation_kind.h."""


@dataclass(frozen=True)
class GateLimits:
    """Changes of a gated activation, as gpt-oss has them.

    Attributes:
        clamp: gates are at most this, and ups within plus and minus this; None bounds nothing.
        alpha: the activated gate is x * sigmoid(alpha x), and 1 is added to the ups; None changes neither.
    """

    clamp: float | None = None
    alpha: float | None = None


class _ReferenceGated(torch.autograd.Function):
    """A gated activation that saves only its input, and writes both gradients into one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, kind: Activation, limits: GateLimits | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kind, ctx.limits = kind, limits
        return _plain_gated(gate_up, kind, limits)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = _limited(gate_up, ctx.limits)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        grad_up.copy_(grad_output).mul_(_activated_gate(gate, ctx.kind, ctx.limits))
        grad_gate.copy_(_gate_backward(grad_output * up, gate, ctx.kind, ctx.limits))
        if ctx.limits is not None and ctx.limits.clamp is not None:
            gate, up = gate_up.chunk(2, dim=-1)
            grad_gate.masked_fill_(gate > ctx.limits.clamp, 0.0)
            grad_up.masked_fill_(up.abs() > ctx.limits.clamp, 0.0)
        return grad, None, None


def _activate(
    gate_and_up: Callable[[torch.Tensor, Activation, GateLimits | None], torch.Tensor],
    inner: torch.Tensor,
    bias: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    kind: Activation,
    gated: bool,
    limits: GateLimits | None = None,
) -> torch.Tensor:
    """The activation [T, F] of ``inner`` [T, I].

    Args:
        gate_and_up: function that computes gated activations.
        inner: if ``gated``, the gates followed by the ups.
        bias: [I], added to ``inner`` first.
        row_weight: [T], at least float32; multiplies the result.
        kind: activation function of the gates, or of all channels if not ``gated``.
        gated: True if the activated gates are multiplied by the ups.
        limits: changes of a gated activation.
    """
    if bias is not None:
        inner = inner + bias
    activated = gate_and_up(inner, kind, limits) if gated else _ungated(inner, kind)
    return activated if row_weight is None else (activated * row_weight.unsqueeze(-1)).to(activated.dtype)


def _memory_saving_gated(inner: torch.Tensor, kind: Activation, limits: GateLimits | None) -> torch.Tensor:
    activated: torch.Tensor = _ReferenceGated.apply(inner, kind, limits)  # type: ignore[no-untyped-call]
    return activated


def _plain_gated(inner: torch.Tensor, kind: Activation, limits: GateLimits | None = None) -> torch.Tensor:
    gate, up = _limited(inner, limits)
    return _activated_gate(gate, kind, limits) * up


def _limited(inner: torch.Tensor, limits: GateLimits | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups [T, F] within the limits; with alpha, the ups plus 1."""
    gate, up = inner.chunk(2, -1)
    if limits is None:
        return gate, up
    if limits.clamp is not None:
        gate, up = gate.clamp(max=limits.clamp), up.clamp(-limits.clamp, limits.clamp)
    return gate, up if limits.alpha is None else up + 1


def _activated_gate(gate: torch.Tensor, kind: Activation, limits: GateLimits | None) -> torch.Tensor:
    if limits is None or limits.alpha is None:
        return _ungated(gate, kind)
    return gate * torch.sigmoid(gate * limits.alpha)


def _gate_backward(grad: torch.Tensor, gate: torch.Tensor, kind: Activation, limits: GateLimits | None) -> torch.Tensor:
    if limits is None or limits.alpha is None:
        return _ungated_backward(grad, gate, kind)
    # x * sigmoid(alpha x) is SiLU(alpha x) / alpha.
    scaled: torch.Tensor = torch.ops.aten.silu_backward(grad, gate * limits.alpha)
    return scaled


def _ungated(inner: torch.Tensor, kind: Activation) -> torch.Tensor:
    if kind == "silu":
        return F.silu(inner)
    if kind in ("relu", "squared_relu"):
        return F.relu(inner) if kind == "relu" else F.relu(inner).square()
    return F.gelu(inner, approximate="tanh" if kind == "gelu_tanh" else "none")


def _ungated_backward(grad: torch.Tensor, inner: torch.Tensor, kind: Activation) -> torch.Tensor:
    found: torch.Tensor
    if kind == "silu":
        found = torch.ops.aten.silu_backward(grad, inner)
    elif kind == "relu":
        found = torch.ops.aten.threshold_backward(grad, inner, 0)
    elif kind == "squared_relu":
        found = grad * F.relu(inner).mul_(2)
    else:
        found = torch.ops.aten.gelu_backward(grad, inner, approximate="tanh" if kind == "gelu_tanh" else "none")
    return found


def _fused(function: Activate) -> Activate:
    """``function``, except for calls that one torch kernel already computes and forms that it lacks."""

    def activate(inner: torch.Tensor, *options: Any) -> torch.Tensor:
        bias, row_weight, kind, gated, *limits = options
        if any(limits):
            return _REFERENCE(inner, *options)
        if bias is None and row_weight is None and not gated and is_one_of_torch(kind, inner.device):
            return _ungated(inner, kind)
        return function(inner, bias, row_weight, kind, gated)

    return activate


def _native(inner: torch.Tensor, *options: Any) -> torch.Tensor:
    bias, row_weight, kind, gated = options
    activated: torch.Tensor = _activation(inner, bias, row_weight, _NUMBERS[kind], gated)
    return activated


def is_one_of_torch(kind: Activation, device: torch.device) -> bool:
    """True if one torch kernel computes the plain activation: nothing is left to fuse.

    On CPUs torch computes the exact GeLU with oneDNN: 22 ms for forward and backward of 4096 x 4096 bfloat16 on one
    core of an AMD EPYC, against 27 ms in the library. The tanh form takes 66 ms in torch and 30 ms in the library.
    """
    if kind == "squared_relu":
        return False
    return device.type == "cuda" or kind in ("gelu", "relu")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    inner, bias, row_weight, ctx.kind, ctx.gated = inputs
    ctx.save_for_backward(inner, bias, row_weight)


@differentiable_once
def _backward(ctx: Any, grad_activated: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    inner, bias, row_weight = ctx.saved_tensors
    grad_inner, grad_bias, grad_row_weight = torch.ops.llmctl.activation_backward(
        grad_activated, inner, bias, row_weight, ctx.kind, ctx.gated
    )
    return (
        grad_inner,
        None if bias is None else grad_bias,
        None if row_weight is None else grad_row_weight,
        None,
        None,
    )


_activation = with_gradient("activation", _keep, _backward)


@dataclass(frozen=True)
class _Example:
    """Arguments of a call with ``tokens`` rows of ``width`` channels."""

    tokens: int
    width: int
    kind: Activation
    gated: bool
    has_bias: bool
    has_weight: bool

    def __call__(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        inner_width = self.width * (2 if self.gated else 1)
        shapes = ((self.tokens, inner_width), (inner_width,), (self.tokens,))
        wide = torch.promote_types(dtype, torch.float32)
        inner, bias, row_weight = (
            torch.randn(shape, generator=generator).to(device, dtype if number < 2 else wide).requires_grad_()
            for number, shape in enumerate(shapes)
        )
        options = (bias if self.has_bias else None, row_weight if self.has_weight else None)
        return inner, *options, self.kind, self.gated


_REFERENCE = partial(_activate, _memory_saving_gated)

ACTIVATION: Operation[Activate] = Operation(
    "activation",
    # Break-even against torch for forward and backward on one core of an Intel Xeon: 16 Ki elements, for SwiGLU and for
    # tanh GeLU with a bias. An AMD EPYC takes 81 us for SwiGLU of 32 Ki elements, and 86 us with torch's operations.
    {
        "native": Implementation(_fused(_native), smallest={"cpu": 1 << 15}),
        "reference": Implementation(_REFERENCE),
    },
    [
        _Example(5, 23, "silu", gated=True, has_bias=True, has_weight=True),
        _Example(9, 264, "gelu", gated=False, has_bias=True, has_weight=False),
        _Example(9, 264, "gelu_tanh", gated=False, has_bias=False, has_weight=True),
        _Example(5, 23, "squared_relu", gated=False, has_bias=True, has_weight=True),
        _Example(9, 264, "relu", gated=True, has_bias=False, has_weight=True),
        # Shapes of models and experts, with and without biases: whole vectors, several column blocks, sums over several
        # rows.
        _Example(9, 4104, "silu", gated=True, has_bias=False, has_weight=False),
        _Example(9, 4104, "silu", gated=True, has_bias=False, has_weight=True),
        _Example(9, 4104, "silu", gated=True, has_bias=True, has_weight=False),
        _Example(9, 4104, "gelu_tanh", gated=False, has_bias=True, has_weight=False),
    ],
    small=partial(_activate, _plain_gated),
)
