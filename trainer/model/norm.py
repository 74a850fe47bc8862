"""LayerNorm and RMSNorm over the last dim; the residual stream with its deferred add.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
See trainer.ops.layer_norm and trainer.ops.rms_norm.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.model.sharding import ParameterBuilder
from trainer.ops.layer_norm import LAYER_NORM
from trainer.ops.rms_norm import ADD_RMS_NORM, RMS_NORM


class Norm(nn.Module):
    """[..., H] -> [..., H].

    Under sequence parallelism each rank normalises its own part of the sequence.
    """

    def __init__(
        self,
        kind: Literal["LayerNorm", "RMSNorm"],
        hidden_size: int,
        epsilon: float,
        builder: ParameterBuilder,
        adds_one: bool = False,
    ):
        """Build the norm; with ``adds_one`` it multiplies by 1 + weight, and weights start at 0."""
        super().__init__()
        initial = 0.0 if adds_one else 1.0
        self.weight = builder.vector("weight", (hidden_size,), value=initial, on_sequence_shard=True)
        self.bias = None
        if kind == "LayerNorm":
            self.bias = builder.vector("bias", (hidden_size,), value=0.0, on_sequence_shard=True)
        self._epsilon = epsilon
        self._kernels = builder.kernels
        self._adds_one = adds_one

    @classmethod
    def of(cls, model: ModelConfig, builder: ParameterBuilder) -> Norm:
        """A norm over the hidden size of ``model``, of its kind."""
        return cls(
            model.normalization, model.hidden_size, model.norm_epsilon, builder, adds_one=model.apply_layernorm_1p
        )

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``hidden``, or of ``hidden + residual``. No communication."""
        if residual is not None:
            return self.of_sum(hidden, residual)[0]
        if self.bias is not None:
            return self._kernels[LAYER_NORM](hidden, self.weight, self.bias, self._epsilon, self._adds_one)
        return self._kernels[RMS_NORM](hidden, self.weight, self._epsilon, self._adds_one)

    def of_sum(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``hidden + residual``, and the sum.

        On one backend the norm is bitwise equal to ``forward`` of the sum.
        """
        if self.bias is None:
            return self._kernels[ADD_RMS_NORM](hidden, residual, self.weight, self._epsilon, self._adds_one)
        total = hidden + residual
        return self.forward(total), total


class Residual(NamedTuple):
    """A deferred residual add of two tensors [S(/t), B, H].

    The next norm adds them in its own pass over memory.

    Attributes:
        hidden: the stream before the last sublayer of the last layer.
        part: the output of that sublayer; None adds nothing.
    """

    hidden: torch.Tensor
    part: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """The sum."""
        return self.hidden if self.part is None else self.hidden + self.part
