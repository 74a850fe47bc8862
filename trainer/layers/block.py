"""One pre-norm transformer layer.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
Radford et al. 2019 (GPT-2), section 2.3: norm before each part, dropout after it, then the residual sum.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import ModelConfig
from trainer.layers.attention import SelfAttention
from trainer.layers.dropout import hidden_dropout
from trainer.layers.mlp import MLP
from trainer.layers.norm import Norm
from trainer.layers.rotary import RotaryTable
from trainer.parameters import ParameterBuilder
from trainer.random_streams import MicroBatchRandomness
from trainer.tensor_parallel.collectives import TensorParallel


class Block(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H]; ``layer`` is its number in the whole model."""

    def __init__(self, model: ModelConfig, layer: int, builder: ParameterBuilder, tp: TensorParallel):
        super().__init__()
        self._layer = layer
        self._tp = tp
        self._dropout = model.hidden_dropout
        norm = (model.normalization, model.hidden_size, model.norm_epsilon)
        self.attention_norm = Norm(*norm, builder.under("attention_norm"))
        self.attention = SelfAttention(model, layer, builder.under("attention"), tp)
        self.mlp_norm = Norm(*norm, builder.under("mlp_norm"))
        self.mlp = MLP(model, builder.under("mlp"), tp)

    def forward(
        self, hidden: torch.Tensor, rotary: RotaryTable | None, randomness: MicroBatchRandomness | None
    ) -> torch.Tensor:
        """Collective: all tp ranks. ``randomness`` None drops nothing."""
        attended = self.attention(self.attention_norm(hidden), rotary, randomness)
        hidden = hidden + hidden_dropout(attended, self._dropout, randomness, "attention_output", self._tp, self._layer)
        transformed = self.mlp(self.mlp_norm(hidden))
        return hidden + hidden_dropout(transformed, self._dropout, randomness, "mlp_output", self._tp, self._layer)
