"""One pre-norm transformer layer.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
Radford et al. 2019 (GPT-2), section 2.3: norm before each sublayer, dropout after it, then the residual add.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.config.sections import ModelConfig
from trainer.distributed.random_streams import DropoutSite
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.mlp import MLP
from trainer.model.moe.layer import MoE
from trainer.model.norm import Norm, Residual
from trainer.model.recompute import Recomputable, forget, recompute
from trainer.model.sharding import ParameterBuilder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Block(nn.Module):
    """Maps a residual stream of [S(/t), B, H] to the next.

    ``layer`` is the block's number in the whole model.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        recomputed: frozenset[str] = frozenset(),
        *,
        defers_add: bool = True,
    ):
        """Build the layer.

        Args:
            model: shape of the model.
            layer: number of the layer in the whole model.
            builder: makes the parameters.
            axes: the axes along which the layer is divided.
            recomputed: parts that backward recomputes: names from training.recompute_modules, or ``layer`` for all.
            defers_add: the next norm makes the last residual add.
        """
        super().__init__()
        self._layer = layer
        self._axes = axes
        self._dropout = model.hidden_dropout
        self._kernels = builder.kernels
        self._recomputed = recomputed
        self._defers_add = defers_add
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

    def forward(self, stream: Residual, forward_pass: ForwardPass, needs_values: bool = True) -> Residual:
        """Collective: all ranks of the layer's axes. For ``needs_values`` see trainer.model.recompute.Recomputable."""
        # Inside the module rather than around it: the module's hooks, such as those of fully sharded weights, then run
        # once for forward and once for backward, and not a third time for the replay.
        if "layer" in self._recomputed and needs_values:
            # Summed, so that recompute keeps one tensor instead of two.
            return Residual(recompute(partial(self._whole, forward_pass), stream.total()))
        return self._transform(forward_pass, stream, needs_values=needs_values)

    def _whole(self, forward_pass: ForwardPass, hidden: torch.Tensor, *, needs_values: bool) -> torch.Tensor:
        return self._transform(forward_pass, Residual(hidden), needs_values=needs_values).total()

    def _transform(self, forward_pass: ForwardPass, stream: Residual, *, needs_values: bool) -> Residual:
        # With dropout, the same pass over memory adds the bias before it and the residual after it.
        drops = self._dropout > 0.0 and forward_pass.randomness is not None
        if stream.part is None:
            hidden = stream.hidden
            normed = self.attention_norm(hidden)
        else:
            normed, hidden = self.attention_norm.of_sum(stream.hidden, stream.part)
        with self._forget_norm(self.attention_norm, hidden, normed):
            attended = self.attention(normed, forward_pass, adds_bias=not drops)
        if drops:
            bias = self.attention.output_bias
            hidden = self._dropped(attended, bias, hidden, forward_pass, "attention_output")
            normed = self.mlp_norm(hidden)
        else:
            normed, hidden = self.mlp_norm.of_sum(hidden, attended)
        with self._forget_norm(self.mlp_norm, hidden, normed):
            name, part, feed_forward = self._feed_forward(forward_pass, adds_bias=not drops)
            if name in self._recomputed:
                transformed = recompute(feed_forward, normed)
            else:
                transformed = feed_forward(normed, needs_values=needs_values)
        if drops:
            return Residual(self._dropped(transformed, part.output_bias, hidden, forward_pass, "mlp_output"))
        stream = Residual(hidden, transformed)
        return stream if self._defers_add else Residual(stream.total())

    def _feed_forward(self, forward_pass: ForwardPass, *, adds_bias: bool) -> tuple[str, MLP | MoE, Recomputable]:
        if self.moe is not None:
            return "moe", self.moe, partial(self.moe, forward_pass=forward_pass, adds_bias=adds_bias)
        assert self.mlp is not None
        return "mlp", self.mlp, partial(self.mlp, adds_bias=adds_bias)

    def _forget_norm(self, norm: Norm, hidden: torch.Tensor, normed: torch.Tensor) -> AbstractContextManager[None]:
        if "layernorm" not in self._recomputed:
            return nullcontext()
        # The norm itself keeps its input, so that this costs no memory; the norm's hooks do not run in the replay.
        return forget(normed, partial(norm.forward, hidden.detach()))

    def _dropped(
        self,
        part: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        forward_pass: ForwardPass,
        site: DropoutSite,
    ) -> torch.Tensor:
        return hidden_dropout(
            part,
            self._dropout,
            forward_pass.randomness,
            site,
            self._axes,
            self._kernels,
            self._layer,
            bias=bias,
            residual=residual,
        )
