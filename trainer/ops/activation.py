"""Feed-forward activations, gated or not, with a fused bias and weight per token.

Legend: T any leading dims, F feed-forward width; I = 2F (gates, then ups) for gated activations, F for others.
GeLU is the exact one, x * Phi(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), or its tanh approximation
(the same section). SwiGLU and GeGLU: Shazeer 2020 (arXiv:2002.05202), equation 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from trainer.ops.autograd import differentiable_once, with_gradient
from trainer.ops.bench_case import Bench, Case, Draw, Size
from trainer.ops.operation import Implementation, Operation, compiled

Activation = Literal["silu", "gelu", "gelu_tanh"]
Activate = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", Activation, bool], torch.Tensor]

_NUMBERS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""Numbers of csrc/common/activation_kind.h."""


class _ReferenceSwiGLU(torch.autograd.Function):
    """SwiGLU that saves only its input, and writes both gradients into one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        # No out= here: torch.compile does not accept views for out=.
        grad_up.copy_(grad_output).mul_(F.silu(gate))
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_output * up, gate))
        return grad


def _activate(
    gate_and_up: Callable[[torch.Tensor], torch.Tensor],
    inner: torch.Tensor,
    bias: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    kind: Activation,
    gated: bool,
) -> torch.Tensor:
    """The activation [T, F] of ``inner`` [T, I].

    Args:
        gate_and_up: function that computes SwiGLU.
        inner: if ``gated``, the gates followed by the ups.
        bias: [I], added to ``inner`` first.
        row_weight: [T], at least float32; multiplies the result.
        kind: activation function of the gates, or of all channels if not ``gated``.
        gated: True if the activated gates are multiplied by the ups.
    """
    if bias is not None:
        inner = inner + bias
    if gated and kind == "silu":
        activated = gate_and_up(inner)
    elif gated:
        gate, up = inner.chunk(2, dim=-1)
        activated = _ungated(gate, kind) * up
    else:
        activated = _ungated(inner, kind)
    return activated if row_weight is None else (activated * row_weight.unsqueeze(-1)).to(activated.dtype)


def _memory_saving_swiglu(inner: torch.Tensor) -> torch.Tensor:
    activated: torch.Tensor = _ReferenceSwiGLU.apply(inner)  # type: ignore[no-untyped-call]
    return activated


def _plain_swiglu(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, -1)
    return F.silu(gate) * up


def _ungated(inner: torch.Tensor, kind: Activation) -> torch.Tensor:
    return F.silu(inner) if kind == "silu" else F.gelu(inner, approximate="tanh" if kind == "gelu_tanh" else "none")


def _fused(function: Activate) -> Activate:
    """``function``, except for calls that one torch kernel already computes."""

    def activate(inner: torch.Tensor, *options: Any) -> torch.Tensor:
        bias, row_weight, kind, gated = options
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
    return device.type == "cuda" or kind == "gelu"


def register() -> None:
    """Register the ops of the loaded library with torch.compile and autograd."""
    torch.library.register_fake("llmctl::activation", _fake)
    torch.library.register_fake("llmctl::activation_backward", _fake_backward)
    torch.library.register_autograd("llmctl::activation", _backward, setup_context=_keep)


def _fake(inner: torch.Tensor, _: Any, __: Any, ___: int, gated: bool) -> torch.Tensor:
    return inner.new_empty((*inner.shape[:-1], inner.shape[-1] // 2 if gated else inner.shape[-1]))


def _fake_backward(
    _: torch.Tensor, inner: torch.Tensor, bias: torch.Tensor | None, row_weight: torch.Tensor | None, *__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (0,) if row_weight is None else row_weight.shape
    return (
        torch.empty_like(inner, memory_format=torch.contiguous_format),
        inner.new_empty((0,) if bias is None else bias.shape),
        inner.new_empty(weights, dtype=torch.promote_types(inner.dtype, torch.float32)),
    )


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


def _case(size: Size, draw: Draw) -> Case:
    tokens, parts, width = size
    inner = draw.leaf(tokens, parts * width)
    if parts == 1:
        bias = draw.leaf(width)
        return Case((inner, bias, None, "gelu_tanh", False), _plain_bias_gelu, 2 * inner.nbytes, 3 * inner.nbytes)
    return Case((inner, None, None, "silu", True), _plain, 3 * inner.nbytes // 2, 5 * inner.nbytes // 2)


def _plain(inner: torch.Tensor, *_: Any) -> torch.Tensor:
    return _plain_swiglu(inner)


def _plain_bias_gelu(inner: torch.Tensor, bias: torch.Tensor, *_: Any) -> torch.Tensor:
    return F.gelu(inner + bias, approximate="tanh")


_REFERENCE = partial(_activate, _memory_saving_swiglu)

ACTIVATION: Operation[Activate] = Operation(
    "activation",
    # Break-even against torch for forward and backward on one core of an Intel Xeon: 16 Ki elements, for SwiGLU and for
    # tanh GeLU with a bias. An AMD EPYC takes 81 us for SwiGLU of 32 Ki elements, and 86 us with torch's operations.
    {
        "native": Implementation(_fused(_native), smallest={"cpu": 1 << 15}),
        "compile": compiled(_REFERENCE),
        "reference": Implementation(_REFERENCE),
    },
    [
        _Example(5, 23, "silu", gated=True, has_bias=True, has_weight=True),
        _Example(9, 264, "gelu", gated=False, has_bias=True, has_weight=False),
        _Example(9, 264, "gelu_tanh", gated=False, has_bias=False, has_weight=True),
        # Shapes of models and experts, with and without biases: whole vectors, several column blocks, sums over several
        # rows.
        _Example(9, 4104, "silu", gated=True, has_bias=False, has_weight=False),
        _Example(9, 4104, "silu", gated=True, has_bias=False, has_weight=True),
        _Example(9, 4104, "silu", gated=True, has_bias=True, has_weight=False),
        _Example(9, 4104, "gelu_tanh", gated=False, has_bias=True, has_weight=False),
    ],
    small=partial(_activate, _plain_swiglu),
    register=register,
    bench=Bench(
        "tokens x 2 x width for SwiGLU, or tokens x 1 x width for GeLU with a bias",
        ((4096, 2, 4096), (4096, 1, 4096), (64, 2, 256)),
        _case,
    ),
)
