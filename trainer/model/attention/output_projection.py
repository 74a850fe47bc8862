"""The last product of attention, which every kind of attention has."""

from __future__ import annotations

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import last_matrix_std
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.linear import RowParallelLinear


def build_projection(
    model: ModelConfig, width: int, builder: ParameterBuilder, tp: TensorParallel
) -> RowParallelLinear:
    """Maps the value channels of all heads, ``width`` of them divided over tp, to hidden_size channels."""
    hidden = model.hidden_size
    weight = builder.weight("weight", (hidden, width), std=last_matrix_std(model), tp_dim=1)
    has_bias = model.has_attention_output_bias
    bias = builder.vector("bias", (hidden,), value=0.0, on_sequence_shard=True) if has_bias else None
    return RowParallelLinear(weight, bias, tp)
