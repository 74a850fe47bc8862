"""One layer with experts in float64, and its config."""

from __future__ import annotations

import torch

from trainer.config.train_config import TrainConfig
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import seeded_generator
from trainer.model.context import ParallelAxes
from trainer.model.moe.layer import MoE
from trainer.model.sharding import ParameterBuilder
from trainer.planning.build_config import build_config

HIDDEN = 16


def config_of(model: dict[str, object], tp: int = 1, ep: int = 1, *, sequence_parallel: bool = False) -> TrainConfig:
    """A config of one layer with four experts."""
    shape = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 24, "num_experts": 4}
    return build_config(
        {
            "model": {**shape, "init_method_std": 0.5, "attention_dropout": 0.0, **model},
            "parallel": {
                "tensor_model_parallel_size": tp,
                "expert_model_parallel_size": ep,
                "sequence_parallel": sequence_parallel,
            },
            "training": {"train_iters": 1, "seq_length": 8, "micro_batch_size": 2},
            "optimizer": {"lr": 1e-3},
        }
    )


def draw(name: str, *shape: int) -> torch.Tensor:
    """Normally distributed float64, the same for equal names."""
    return torch.randn(shape, generator=seeded_generator("cpu", name), dtype=torch.float64)


def build_layer(config: TrainConfig, mesh: ParallelMesh, groups: ProcessGroups) -> tuple[MoE, ParameterBuilder]:
    """This rank's part of the layer."""
    builder = ParameterBuilder(3, mesh, config.parallel.sequence_parallel, torch.float64, torch.device("cpu"))
    return MoE(config.model, builder, ParallelAxes.build(config, mesh, groups)), builder
