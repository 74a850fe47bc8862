"""The experts of a rank: feed-forward layers, each for its range of rows.

Legend: R rows sorted by expert, H hidden, F feed-forward width of an expert, E experts; ``/t`` = divided over tp,
``/e`` over ep.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.config.sections.scales import last_matrix_std, matrix_std
from trainer.model.mlp import FeedForwardActivation
from trainer.model.moe.grouped_products import (
    Offsets,
    add_per_expert,
    grouped_outer,
    grouped_product,
    has_grouped_kernel,
    sum_per_expert,
)
from trainer.model.recompute import forget

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.model.sharding import ParameterBuilder


class GroupedWeightGradientAccumulator(Protocol):
    """Takes a weight gradient as the factors of its matrix products, one per expert."""

    def add_grouped_outer(self, grad_output: torch.Tensor, inputs: torch.Tensor, offsets: Offsets) -> None:
        """Add ``grad_output_e^T @ inputs_e`` to the gradient of every expert e.

        An expert without rows adds nothing.

        Args:
            grad_output: [R, out].
            inputs: [R, in].
            offsets: ranges of the experts.
        """


class _GroupedLinear(torch.autograd.Function):
    """``inputs_e @ weight_e^T + bias_e`` for every expert e."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        offsets: Offsets,
        accumulator: GroupedWeightGradientAccumulator | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.offsets, ctx.accumulator, ctx.has_bias = offsets, accumulator, bias is not None
        outputs = grouped_product(inputs, weight.flatten(1, -2).transpose(1, 2), offsets)
        if bias is not None:
            add_per_expert(outputs, bias.flatten(1), offsets)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        offsets: Offsets = ctx.offsets
        grad_inputs = grouped_product(grad_output, weight.flatten(1, -2), offsets)
        grad_weight = grad_bias = None
        if ctx.accumulator is not None:
            # Detached, because an accumulator may defer the product, and must not keep the graph alive.
            ctx.accumulator.add_grouped_outer(grad_output, inputs.detach(), offsets)
        else:
            grad_weight = grouped_outer(grad_output, inputs, offsets).view(weight.shape)
        if ctx.has_bias:
            grad_bias = sum_per_expert(grad_output, offsets).view(weight.shape[:-1])
        return grad_inputs, grad_weight, grad_bias, None, None


class GroupedLinear(nn.Module):
    """[R, in] -> [R, out] with a weight [E/e, ..., in].

    The dims between the first and the last make up ``out``.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._shape = weight.shape
        self.gradient_accumulator: GroupedWeightGradientAccumulator | None = None
        """Receives the weight gradient instead of ``weight.grad``."""

    def has_grouped_kernel(self, inputs: torch.Tensor) -> bool:
        """True if ``forward`` takes offsets on the device."""
        return has_grouped_kernel(inputs, self._shape)

    def forward(self, inputs: torch.Tensor, offsets: Offsets, bias_share: float = 1.0) -> torch.Tensor:
        """No communication.

        Args:
            inputs: [R, in], sorted by expert.
            offsets: ranges of the experts.
            bias_share: factor of the bias.
        """
        # The parameters may have been flattened, for sharding into equal sizes.
        weight = self.weight if self.weight.shape == self._shape else self.weight.view(self._shape)
        bias = None if self.bias is None else self.bias.view(self._shape[:-1])
        if bias is not None and bias_share != 1.0:
            bias = bias * bias_share
        outputs: torch.Tensor = _GroupedLinear.apply(inputs, weight, bias, offsets, self.gradient_accumulator)  # type: ignore[no-untyped-call]
        return outputs


class Experts(nn.Module):
    """Rows [R, H] -> [R, H] through this rank's E/e experts.

    Each expert has F/t inner channels, and the results are partial sums over tp; or it is whole.
    """

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, divided: int, recompute_activation: bool = False):
        """Build experts that ``divided`` tp ranks divide; for ``recompute_activation`` see the mixture of experts."""
        super().__init__()
        assert model.num_experts is not None
        self._activation = FeedForwardActivation(model, builder.kernels, builder.device)
        self._is_linear = model.disable_bias_linear
        self._recompute_activation = recompute_activation
        # Every such rank adds its share of the bias: the outputs are summed over tp later.
        self._bias_share = 1.0 / divided
        hidden, ffn, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
        inner = (2, ffn) if model.is_gated else (ffn,)  # gate, then up
        fc1, fc2 = builder.under("fc1"), builder.under("fc2")
        has_bias = not model.disable_bias_linear
        self.fc1 = GroupedLinear(
            fc1.experts("weight", (experts, *inner, hidden), std=matrix_std(model), tp_dim=len(inner)),
            fc1.vector("bias", (experts, *inner), value=0.0, tp_dim=len(inner), on_sequence_shard=False, is_expert=True)
            if has_bias
            else None,
        )
        std = last_matrix_std(model)
        self.fc2 = GroupedLinear(
            fc2.experts("weight", (experts, hidden, ffn), std=std, tp_dim=2),
            fc2.vector(
                "bias", (experts, hidden), value=0.0, on_sequence_shard=False, partial_over_tp=True, is_expert=True
            )
            if has_bias
            else None,
        )

    @property
    def takes_weights(self) -> bool:
        """True if the experts multiply rows by the router's weights.

        The activation's kernel does so in the same pass, and a matrix product without a bias after it is linear.
        """
        return self._activation.is_fused and self._is_linear

    def has_grouped_kernel(self, tokens: torch.Tensor) -> bool:
        """True if ``forward`` takes offsets on the device, for rows like ``tokens``."""
        return self.fc1.has_grouped_kernel(tokens) and self.fc2.has_grouped_kernel(tokens)

    def forward(self, rows: torch.Tensor, offsets: Offsets, row_weights: torch.Tensor | None = None) -> torch.Tensor:
        """No communication.

        Args:
            rows: [R, H], sorted by expert.
            offsets: ranges of the experts.
            row_weights: float32 [R], factors of the outputs, if the experts take weights.
        """
        inner = self.fc1(rows, offsets)  # [R, F/t], twice that if gated
        activated = self._activation(inner, row_weight=row_weights)
        # The activation itself keeps its input, so that this costs no memory.
        kept = None if row_weights is None else row_weights.detach()
        again = partial(self._activation, inner.detach(), row_weight=kept)
        with forget(activated, again) if self._recompute_activation else nullcontext():
            return self.fc2(activated, offsets, self._bias_share)  # type: ignore[no-any-return]
