"""ParallelModel: this rank's part of the model, joined with its gradient store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.data_parallel.frozen_weights import FrozenWeights
from trainer.data_parallel.gradient_buckets import GradientBuckets
from trainer.data_parallel.parameter_shards import StoredShard
from trainer.data_parallel.sharded_buckets import ShardedBuckets
from trainer.model.context import ParallelAxes
from trainer.model.decoder import GPTStage
from trainer.model.encoder_decoder.model import EncoderDecoder
from trainer.model.head import TokenLoss
from trainer.model.initial_values import fill_all
from trainer.model.moe.expert_bias import move_expert_biases
from trainer.model.moe.losses import coefficients
from trainer.model.moe.router_numbers import RouterNumbers, router_numbers, take_auxiliary_losses
from trainer.model.mtp import take_losses
from trainer.model.sharding import Fill, ParameterBuilder, ParameterLayout
from trainer.model.stage import Stage
from trainer.ops.dispatch.registry import Kernels
from trainer.planning.pipeline import pipeline_placement, pipeline_schedule
from trainer.planning.schedule.placement import Placement
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.sections.training import TrainingConfig
    from trainer.config.train_config import TrainConfig
    from trainer.data_parallel.parameter_shards import GradientStore
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups

# Threads that draw initial weights; each holds one piece of a weight. An 8B model takes 22 s of one core.
_MOST_THREADS = 16


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of the model and its gradient store.

    Names are global, in order of use in forward.
    """

    chunks: tuple[Stage, ...]
    """This rank's virtual stages, in order of the forward pass."""
    placement: Placement
    schedule: str
    """Name of the pipeline schedule."""
    num_layers: int
    """Number of layers of the whole model, prediction layers included."""
    prediction_depths: int
    """Tokens after the next one that the model predicts in training."""
    auxiliary_losses: tuple[str, ...]
    """Names of the auxiliary losses of layers with experts, in the order of RouterNumbers."""
    axes: ParallelAxes
    mesh: ParallelMesh
    groups: ProcessGroups
    layouts: dict[str, ParameterLayout]
    """Layouts of this rank's parameters only."""
    parameters: dict[str, nn.Parameter]
    """Whole tensors of this rank's part; if the gradient store also shards the weights, their shards."""
    buffers: dict[str, torch.Tensor]
    """Buffers in checkpoints, whole on each rank that holds them."""
    gradients: GradientStore
    kernels: Kernels
    """Ops that layers and optimizer use."""

    @property
    def stored_shards(self) -> list[StoredShard]:
        """This rank's part of all tensors of a checkpoint: the shards of its parameters, and its buffers."""
        return [*self.gradients.parameter_shards, *self.buffer_shards]

    @property
    def buffer_shards(self) -> list[StoredShard]:
        """The buffers, flattened."""
        return [StoredShard(name, 0, buffer.view(-1)) for name, buffer in self.buffers.items()]

    def move_expert_biases(self, *, was_skipped: bool) -> None:
        """Move the expert biases against the load of the step. Collective: all ranks, after each optimizer step."""
        move_expert_biases(self.chunks, self.groups.dp_cp, was_skipped=was_skipped)

    @property
    def router_numbers(self) -> list[RouterNumbers]:
        """Sums over the micro-batches of this rank's layers with experts."""
        return router_numbers(self.chunks)

    def take_further_losses(self) -> dict[str, tuple[float, float]]:
        """This rank's sum and count of each further loss since the last call, by its name in a row.

        Summed over all ranks these are the totals of the global batch: token losses and labels of each prediction
        depth, and the auxiliary losses of the layers with experts with their number of layers and micro-batches. Every
        rank has the same names.
        """
        depths = [f"mtp_{depth}_loss" for depth in range(1, self.prediction_depths + 1)]
        found = dict.fromkeys((*depths, *self.auxiliary_losses), (0.0, 0.0))
        # All tp ranks have the same numbers.
        if self.mesh.tp_rank == 0 and depths:
            found |= zip(depths, [(loss, count) for loss, count in take_losses(self.chunks)], strict=False)
        if self.mesh.tp_rank == 0 and self.auxiliary_losses:
            *losses, count = take_auxiliary_losses(self.chunks) or (0.0,)
            found |= {name: (loss, count) for name, loss in zip(self.auxiliary_losses, losses, strict=False)}
        return found


def build_model(
    config: TrainConfig,
    vocab_size: int,
    mesh: ParallelMesh,
    groups: ProcessGroups,
    device: torch.device,
    kernels: Kernels | None = None,
    *,
    is_frozen: bool = False,
    draws: bool = True,
    token_loss: TokenLoss | None = None,
) -> ParallelModel:
    """Build this rank's part of the model that ``config`` describes, with its initial values.

    Every rank draws the same global tensors from training.seed, piece by piece, and keeps its own part: no rank ever
    holds more. Collective: all ranks of the job, because sharded weights may need new groups.

    Args:
        config: the training config; its precision is the parameters' dtype.
        vocab_size: number of token ids, without padding.
        mesh: this rank's place.
        groups: this rank's process groups.
        device: device of the parameters.
        kernels: ops of layers and optimizer; None takes the reference backends.
        is_frozen: the model is only run: no initial values are drawn, and there are no gradients. Its weights are
            undefined until they are loaded.
        draws: False: all weights are loaded next, and matrices are zeros until then.
        token_loss: the user's loss; None: that of the architecture.
    """
    is_sharded = not is_frozen and _shards_weights(config, mesh)
    fills: dict[str, Fill] = {}
    builder = ParameterBuilder(
        seed=config.training.seed,
        mesh=mesh,
        sequence_parallel=config.parallel.sequence_parallel,
        dtype=parameter_dtype(config.training),
        device=device,
        kernels=kernels or Kernels(),
        draws=draws and not is_frozen,
        init_method=config.model.init_method,
        fills=fills,
        has_memory=not is_sharded,
    )
    axes = ParallelAxes.build(config, mesh, groups)
    placement = pipeline_placement(config)
    chunks = _build_chunks(config, vocab_size, placement, builder, axes, token_loss)
    store = FrozenWeights if is_frozen else _store_class(config, mesh, device)
    # After all chunks: the store needs every parameter of this rank.
    gradients = store(builder.parameters, builder.layouts, mesh, groups, config.parallel)
    gradients.connect(chunks)
    _fill(gradients.parameter_shards if is_sharded else _whole(builder), fills)
    return ParallelModel(
        chunks=chunks,
        placement=placement,
        schedule=pipeline_schedule(config),
        num_layers=config.model.num_layers + config.model.mtp_num_layers,
        prediction_depths=config.model.mtp_num_layers,
        auxiliary_losses=tuple(coefficients(config.model)),
        axes=axes,
        mesh=mesh,
        groups=groups,
        layouts=builder.layouts,
        parameters=builder.parameters,
        buffers=builder.buffers,
        gradients=gradients,
        kernels=builder.kernels,
    )


def _whole(builder: ParameterBuilder) -> list[StoredShard]:
    """The parameters, flattened."""
    return [StoredShard(name, 0, parameter.detach().view(-1)) for name, parameter in builder.parameters.items()]


def _fill(parts: Sequence[StoredShard], fills: Mapping[str, Fill]) -> None:
    """Write the initial values of ``parts``, the largest first."""
    drawn = sorted((part for part in parts if part.name in fills), key=lambda part: -part.weight.numel())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    # The ranks of a node share its cores: each takes all it may use, up to a number that leaves little waiting.
    threads = min(cores, _MOST_THREADS)
    fill_all((partial(fills[part.name], part.weight, part.start) for part in drawn), threads)


def _build_chunks(
    config: TrainConfig,
    vocab_size: int,
    placement: Placement,
    builder: ParameterBuilder,
    axes: ParallelAxes,
    token_loss: TokenLoss | None,
) -> tuple[Stage, ...]:
    """This rank's virtual stages."""
    if config.model.is_encoder_decoder:
        return (EncoderDecoder(config, vocab_size, builder, axes),)
    layers = partition_layers(config, vocab_size)
    own = [placement.virtual_stage(builder.mesh.pp_rank, chunk) for chunk in range(placement.chunks)]
    return tuple(
        GPTStage(
            config,
            vocab_size,
            layers[number],
            builder,
            axes,
            is_first=number == 0,
            is_last=number == placement.num_virtual_stages - 1,
            token_loss=token_loss,
        )
        for number in own
    )


def _shards_weights(config: TrainConfig, mesh: ParallelMesh) -> bool:
    """True if the ranks that hold the same weights divide them: ZeRO-2 and ZeRO-3."""
    return config.parallel.zero_stage >= 2 and mesh.data_size > 1


def _store_class(config: TrainConfig, mesh: ParallelMesh, device: torch.device) -> Callable[..., GradientStore]:
    if _shards_weights(config, mesh):
        # Imported here, because the import takes a third of torch's own time.
        from trainer.data_parallel.fully_sharded import FullyShardedStore

        return partial(FullyShardedStore, device=device)
    dtype = torch.bfloat16 if config.optimizer.main_grads_dtype == "bf16" else torch.float32
    return partial(ShardedBuckets if config.parallel.zero_stage == 1 else GradientBuckets, dtype=dtype)


def parameter_dtype(training: TrainingConfig) -> torch.dtype:
    """The dtype of parameters and activations."""
    if training.bf16:
        return torch.bfloat16
    return torch.float16 if training.fp16 else torch.float32
