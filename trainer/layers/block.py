"""One pre-norm transformer layer.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
Radford et al. 2019 (GPT-2), section 2.3: norm before each part, dropout after it, then the residual sum.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.axes import ParallelAxes
from trainer.config import ModelConfig
from trainer.forward_pass import ForwardPass
from trainer.layers.attention import SelfAttention
from trainer.layers.dropout import hidden_dropout
from trainer.layers.mlp import MLP
from trainer.layers.norm import Norm
from trainer.parameters import ParameterBuilder
from trainer.random_streams import DropoutSite


class Block(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H]; ``layer`` is its number in the whole model."""

    def __init__(self, model: ModelConfig, layer: int, builder: ParameterBuilder, axes: ParallelAxes):
        super().__init__()
        self._layer = layer
        self._axes = axes
        self._dropout = model.hidden_dropout
        norm = (model.normalization, model.hidden_size, model.norm_epsilon)
        self.attention_norm = Norm(*norm, builder.under("attention_norm"))
        self.attention = SelfAttention(model, layer, builder.under("attention"), axes)
        self.mlp_norm = Norm(*norm, builder.under("mlp_norm"))
        self.mlp = MLP(model, builder.under("mlp"), axes.tp)

    def forward(self, hidden: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        """Collective: all ranks of the layer's axes."""
        attended = self.attention(self.attention_norm(hidden), forward_pass)
        hidden = hidden + self._dropped(attended, forward_pass, "attention_output")
        transformed = self.mlp(self.mlp_norm(hidden))
        return hidden + self._dropped(transformed, forward_pass, "mlp_output")

    def _dropped(self, hidden: torch.Tensor, forward_pass: ForwardPass, site: DropoutSite) -> torch.Tensor:
        return hidden_dropout(hidden, self._dropout, forward_pass.randomness, site, self._axes, self._layer)
