"""The last product of attention, which every kind of attention has."""

from __future__ import annotations

import math

from trainer.config.sections.model import ModelConfig
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.linear import RowParallelLinear


def build_projection(
    model: ModelConfig, width: int, builder: ParameterBuilder, tp: TensorParallel
) -> RowParallelLinear:
    """Maps the value channels of all heads, ``width`` of them divided over tp, to hidden_size channels."""
    hidden = model.hidden_size
    std = model.init_method_std / math.sqrt(2 * model.num_layers)
    weight = builder.weight("weight", (hidden, width), std=std, tp_dim=1)
    has_bias = model.has_attention_output_bias
    bias = builder.vector("bias", (hidden,), value=0.0, on_sequence_shard=True) if has_bias else None
    return RowParallelLinear(weight, bias, tp)
