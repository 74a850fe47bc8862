"""The feed-forward part of a block, its inner width divided over tp.

Legend: S sequence, B micro-batch, H hidden, F feed-forward width; ``/t`` = divided over tp.
GeLU is the exact one, x * Phi(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), or with openai_gelu its tanh
approximation (the same section), which Megatron-LM's fused bias-gelu takes too. SwiGLU: Shazeer 2020
(arXiv:2002.05202), equation 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.config import ModelConfig
from trainer.parameters import ParameterBuilder
from trainer.tensor_parallel.collectives import TensorParallel
from trainer.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping only its input for backward and writing the two gradients into one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grad_output, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_output * up, gate, grad_input=grad_gate)
        return grad


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    activated: torch.Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return activated


def activation_of(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's activation: [..., F] -> [..., F], or with SwiGLU [..., 2F] (gates, then ups) -> [..., F]."""
    if model.swiglu:
        return _swiglu
    return partial(F.gelu, approximate="tanh" if model.openai_gelu else "none")


class MLP(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H] through F/t inner channels per tp rank."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, tp: TensorParallel, ffn_size: int | None = None):
        """Build the layer, ``ffn_size`` channels wide; unset: as wide as the model's dense layers."""
        super().__init__()
        self._activation = activation_of(model)
        hidden, ffn = model.hidden_size, ffn_size or model.ffn_size
        inner = (2, ffn) if model.swiglu else (ffn,)  # gate, then up
        fc1, fc2 = builder.under("fc1"), builder.under("fc2")
        has_bias = not model.disable_bias_linear
        inner_dim = len(inner) - 1
        self.fc1 = ColumnParallelLinear(
            fc1.weight("weight", (*inner, hidden), std=model.init_method_std, tp_dim=inner_dim),
            fc1.vector("bias", inner, value=0.0, tp_dim=inner_dim, on_sequence_shard=False) if has_bias else None,
            tp,
        )
        self.fc2 = RowParallelLinear(
            fc2.weight("weight", (hidden, ffn), std=model.init_method_std / math.sqrt(2 * model.num_layers), tp_dim=1),
            fc2.vector("bias", (hidden,), value=0.0, on_sequence_shard=True) if has_bias else None,
            tp,
        )

    def forward(self, hidden: torch.Tensor, values_needed: bool = True, in_region: bool = False) -> torch.Tensor:
        """Collective: all tp ranks, unless ``in_region``. For ``values_needed`` see trainer.recompute.Recomputable.

        ``in_region``: from whole [S, B, H] to this rank's summands, without the last bias: see RowParallelLinear.
        """
        inner = self.fc1(hidden, in_region)  # [S, B, F/t], twice that with SwiGLU
        return self.fc2(self._activation(inner), values_needed, in_region)  # type: ignore[no-any-return]
