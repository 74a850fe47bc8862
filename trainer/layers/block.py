"""One pre-norm transformer layer.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
Radford et al. 2019 (GPT-2), section 2.3: norm before each part, dropout after it, then the residual sum.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.axes import ParallelAxes
from trainer.config import ModelConfig
from trainer.forward_pass import ForwardPass
from trainer.layers.attention import SelfAttention
from trainer.layers.dropout import hidden_dropout
from trainer.layers.mlp import MLP
from trainer.layers.norm import Norm
from trainer.moe.layer import MoE
from trainer.parameters import ParameterBuilder
from trainer.random_streams import DropoutSite
from trainer.recompute import Recomputable, forget, recompute

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Block(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H]; ``layer`` is its number in the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        recomputed: frozenset[str] = frozenset(),
    ):
        """Build the layer.

        Args:
            model: shape of the model.
            layer: number of the layer in the whole model.
            builder: makes the parameters.
            axes: the axes along which the layer is divided.
            recomputed: what backward computes again: names out of training.recompute_modules, or ``layer`` for all.
        """
        super().__init__()
        self._layer = layer
        self._axes = axes
        self._dropout = model.hidden_dropout
        self._recomputed = recomputed
        norm = (model.normalization, model.hidden_size, model.norm_epsilon)
        self.attention_norm = Norm(*norm, builder.under("attention_norm"))
        self.attention = SelfAttention(
            model, layer, builder.under("attention"), axes, recompute_core="core_attn" in recomputed
        )
        self.mlp_norm = Norm(*norm, builder.under("mlp_norm"))
        self.mlp: MLP | None = None
        self.moe: MoE | None = None
        if model.is_moe_layer(layer):
            self.moe = MoE(model, builder.under("moe"), axes, recompute_activation="moe_act" in recomputed)
        else:
            self.mlp = MLP(model, builder.under("mlp"), axes.tp)

    def forward(self, hidden: torch.Tensor, forward_pass: ForwardPass, values_needed: bool = True) -> torch.Tensor:
        """Collective: all ranks of the layer's axes. For ``values_needed`` see trainer.recompute.Recomputable."""
        # In here rather than around the module: whatever is hooked to the module, as fully sharded weights are, then
        # goes on for forward and backward as a whole, and not a third time for the replay.
        if "layer" in self._recomputed and values_needed:
            return recompute(partial(self._transform, forward_pass), hidden)
        return self._transform(forward_pass, hidden, values_needed=values_needed)

    def _transform(self, forward_pass: ForwardPass, hidden: torch.Tensor, *, values_needed: bool) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        with self._forget_norm(self.attention_norm, hidden, normed):
            attended = self.attention(normed, forward_pass)
        hidden = hidden + self._dropped(attended, forward_pass, "attention_output")
        normed = self.mlp_norm(hidden)
        with self._forget_norm(self.mlp_norm, hidden, normed):
            name, feed_forward = self._feed_forward(forward_pass)
            if name in self._recomputed:
                transformed = recompute(feed_forward, normed)
            else:
                transformed = feed_forward(normed, values_needed=values_needed)
        return hidden + self._dropped(transformed, forward_pass, "mlp_output")

    def _feed_forward(self, forward_pass: ForwardPass) -> tuple[str, Recomputable]:
        if self.moe is not None:
            return "moe", partial(self.moe, forward_pass=forward_pass)
        assert self.mlp is not None
        return "mlp", self.mlp

    def _forget_norm(self, norm: Norm, hidden: torch.Tensor, normed: torch.Tensor) -> AbstractContextManager[None]:
        if "layernorm" not in self._recomputed:
            return nullcontext()
        # The norm itself keeps its input, so that this costs no memory; its hooks have no part in it.
        return forget(normed, partial(norm.forward, hidden.detach()))

    def _dropped(self, hidden: torch.Tensor, forward_pass: ForwardPass, site: DropoutSite) -> torch.Tensor:
        return hidden_dropout(hidden, self._dropout, forward_pass.randomness, site, self._axes, self._layer)
