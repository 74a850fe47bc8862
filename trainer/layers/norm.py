"""LayerNorm and RMSNorm over the last dim. Statistics are float32 for 16-bit activations.

Ba et al. 2016 (arXiv:1607.06450), equation 3; Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainer.parameters import ParameterBuilder


class Norm(nn.Module):
    """[..., H] -> [..., H]. Under sequence parallelism each rank normalises its own part of the sequence."""

    def __init__(
        self, kind: Literal["LayerNorm", "RMSNorm"], hidden_size: int, epsilon: float, builder: ParameterBuilder
    ):
        super().__init__()
        self.weight = builder.vector("weight", (hidden_size,), value=1.0, on_sequence_shard=True)
        self.bias = None
        if kind == "LayerNorm":
            self.bias = builder.vector("bias", (hidden_size,), value=0.0, on_sequence_shard=True)
        self._epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """No communication."""
        if self.bias is None:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self._epsilon)
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self._epsilon)
