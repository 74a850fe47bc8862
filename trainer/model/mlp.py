"""The feed-forward part of a block, with its inner width divided over tp.

Legend: S sequence, B micro-batch, H hidden, F feed-forward width; ``/t`` = divided over tp.
The activations are those of trainer.ops.activation. gelu_tanh is also what Megatron-LM's fused bias-gelu computes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import last_matrix_std, matrix_std
from trainer.model.recompute import forget
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from trainer.ops.activation import ACTIVATION, Activation, GateLimits, is_one_of_torch
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.operation import BySize


class FeedForwardActivation:
    """The model's activation: [..., F] -> [..., F].

    If gated [..., 2F] (gates, then ups) -> [..., F].
    """

    def __init__(self, model: ModelConfig, kernels: Kernels, device: torch.device):
        self._kernels = kernels
        self._kind: Activation = model.activation
        self._gated = model.is_gated
        self._limits: GateLimits | None = None
        if model.activation_clamp is not None or model.activation_alpha is not None:
            self._limits = GateLimits(model.activation_clamp, model.activation_alpha)
        self._is_one_of_torch = device.type == "cpu" and is_one_of_torch(self._kind, device)

    @property
    def is_fused(self) -> bool:
        """True if a kernel computes the whole activation in one pass over memory."""
        return self._limits is None and self._kernels[ACTIVATION] is not Kernels()[ACTIVATION]

    def adds_bias(self, elements: int) -> bool:
        """True if the kernel adds a bias over ``elements`` at no cost.

        Otherwise the matrix product adds it.
        """
        function = self._kernels[ACTIVATION]
        smallest = function.smallest if isinstance(function, BySize) else 0
        return self.is_fused and not self._is_one_of_torch and elements >= smallest

    def __call__(
        self, inner: torch.Tensor, bias: torch.Tensor | None = None, row_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add ``bias`` first, and multiply each row by its ``row_weight``, float32, last. No communication."""
        function = self._kernels[ACTIVATION]
        if self._limits is None:
            return function(inner, bias, row_weight, self._kind, self._gated)
        return function(inner, bias, row_weight, self._kind, self._gated, self._limits)


class MLP(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H] through F/t inner channels per tp rank."""

    def __init__(
        self,
        model: ModelConfig,
        builder: ParameterBuilder,
        tp: TensorParallel,
        ffn_size: int | None = None,
        *,
        recompute_activation: bool = False,
    ):
        """Build the layer, ``ffn_size`` channels wide; with ``recompute_activation`` backward recomputes fc2's input.

        None takes the width of the model's dense layers.
        """
        super().__init__()
        self._activation = FeedForwardActivation(model, builder.kernels, builder.device)
        self._recompute_activation = recompute_activation
        hidden, ffn = model.hidden_size, ffn_size or model.ffn_size
        inner = (2, ffn) if model.is_gated else (ffn,)  # gate, then up
        fc1, fc2 = builder.under("fc1"), builder.under("fc2")
        has_bias = not model.disable_bias_linear
        self._sequence_shards = tp.size if tp.sequence_parallel else 1
        inner_dim = len(inner) - 1
        self.fc1 = ColumnParallelLinear(
            fc1.weight("weight", (*inner, hidden), std=matrix_std(model), tp_dim=inner_dim),
            fc1.vector("bias", inner, value=0.0, tp_dim=inner_dim, on_sequence_shard=False) if has_bias else None,
            tp,
        )
        self.fc2 = RowParallelLinear(
            fc2.weight("weight", (hidden, ffn), std=last_matrix_std(model), tp_dim=1),
            fc2.vector("bias", (hidden,), value=0.0, on_sequence_shard=True) if has_bias else None,
            tp,
        )

    @property
    def output_bias(self) -> nn.Parameter | None:
        """[H], the bias added to the output."""
        return self.fc2.bias

    def forward(
        self, hidden: torch.Tensor, needs_values: bool = True, inside_tp_region: bool = False, *, adds_bias: bool = True
    ) -> torch.Tensor:
        """Collective: all tp ranks, unless ``inside_tp_region``.

        For ``needs_values`` see trainer.model.recompute.Recomputable.

        ``inside_tp_region``: maps the whole [S, B, H] to this rank's partial sums, without the last bias: see
        RowParallelLinear. Without ``adds_bias`` the next op adds ``output_bias``.
        """
        bias = self.fc1.bias
        tokens = hidden.shape[:-1].numel() * (1 if inside_tp_region else self._sequence_shards)
        if bias is not None and not self._activation.adds_bias(tokens * bias.numel()):
            bias = None
        inner = self.fc1(hidden, inside_tp_region, adds_bias=bias is None)  # [S, B, F/t], twice that if gated
        flat = None if bias is None else bias.flatten()
        activated = self._activation(inner, flat)
        # The activation itself keeps its input, so that this costs no memory.
        again = partial(self._activation, inner.detach(), None if flat is None else flat.detach())
        with forget(activated, again) if self._recompute_activation else nullcontext():
            return self.fc2(activated, needs_values, inside_tp_region, adds_bias=adds_bias)  # type: ignore[no-any-return]
