"""ParallelModel: this rank's stage of the model, joined with the buffers that its gradients go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.data_parallel.gradient_buckets import GradientBuckets
from trainer.models.gpt import GPTStage
from trainer.parameters import ParameterBuilder, ParameterLayout
from trainer.pipeline.stage import layers_of_stage
from trainer.tensor_parallel.collectives import TensorParallel

if TYPE_CHECKING:
    from trainer.config import TrainConfig, TrainingConfig
    from trainer.mesh import ParallelMesh, ProcessGroups


@dataclass(frozen=True)
class ParallelModel:
    """What one rank holds of the model, and how to complete it. Names are global names, in order of use in forward."""

    stage: GPTStage
    mesh: ParallelMesh
    groups: ProcessGroups
    layouts: dict[str, ParameterLayout]
    """Of this rank's parameters only."""
    parameters: dict[str, nn.Parameter]
    gradients: GradientBuckets


def build_model(
    config: TrainConfig, vocab_size: int, mesh: ParallelMesh, groups: ProcessGroups, device: torch.device
) -> ParallelModel:
    """This rank's part of the model that ``config`` describes, with its initial values.

    No communication: every rank draws the same global tensors from training.seed and keeps its own part.

    Args:
        config: the training config; its precision is the parameters' dtype.
        vocab_size: number of token ids, without padding.
        mesh: this rank's place.
        groups: its process groups.
        device: where the parameters live.
    """
    sequence_parallel = config.parallel.sequence_parallel and mesh.tp > 1
    builder = ParameterBuilder(
        seed=config.training.seed,
        tp=mesh.tp,
        tp_rank=mesh.tp_rank,
        sequence_parallel=sequence_parallel,
        dtype=parameter_dtype(config.training),
        device=device,
    )
    layers = layers_of_stage(config.model.num_layers, mesh.pp, mesh.pp_rank)
    stage = GPTStage(config, vocab_size, layers, builder, TensorParallel.build(mesh, groups, sequence_parallel))
    gradients = GradientBuckets(builder.parameters, builder.layouts, groups, config.parallel, mesh.dp)
    gradients.connect(stage)
    return ParallelModel(stage, mesh, groups, builder.layouts, builder.parameters, gradients)


def parameter_dtype(training: TrainingConfig) -> torch.dtype:
    """The dtype of parameters and activations."""
    if training.bf16:
        return torch.bfloat16
    return torch.float16 if training.fp16 else torch.float32
