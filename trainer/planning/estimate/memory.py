"""Memory of every pipeline rank over a step, item by item. Torch-free.

Sources in the trainer: data_parallel/gradient_buckets.py and sharded_buckets.py (weights, main gradients),
fully_sharded.py (ZeRO-2 and 3), optimizer/masters.py and cpu_offload.py (states), pipeline/executor.py (activations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.estimate.activations import element_bytes, stage_bytes, tokens_per_rank
from trainer.planning.estimate.devices import GIB
from trainer.planning.estimate.parameters import RankParameters, rank_parameters
from trainer.planning.pipeline import pipeline_placement, pipeline_schedule
from trainer.planning.schedule import ActionKind, PipelineSchedule, build_schedule
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

RUNTIME = int(0.9 * GIB)
"""CUDA context, kernels and workspaces of matrix products: an assumption."""
COMMUNICATOR = int(0.15 * GIB)
"""Buffers of one communicator of NCCL: an assumption."""
FRAGMENTS = 0.05
"""Share of the activations that the allocator loses between blocks: an assumption."""

ITEMS = (
    *("weights", "main_gradients", "optimizer_state", "activations", "recompute", "logits"),
    *("communication", "runtime", "allocator"),
)
STATES = ITEMS[:3]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank by item of ITEMS, at the peak of the step."""

    pp_rank: int
    bytes_of: dict[str, int]

    @property
    def total(self) -> int:
        """Peak of the rank."""
        return sum(self.bytes_of.values())

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state: a lower bound of any run."""
        return sum(self.bytes_of[item] for item in STATES)


def schedule_of(config: TrainConfig, world_size: int) -> PipelineSchedule:
    """The schedule table that will run."""
    placement = pipeline_placement(config)
    dp = config.data_parallel_size(world_size)
    count = config.batch_sizes(dp).largest // (config.training.micro_batch_size * dp)
    return build_schedule(pipeline_schedule(config), placement.pp, placement.chunks, count)


def memory_of_ranks(config: TrainConfig, vocab_size: int, world_size: int) -> list[RankMemory]:
    """Memory of each pipeline rank; the ranks of a pipeline rank differ only by the load of their experts."""
    schedule = schedule_of(config, world_size)
    return [rank_memory(config, vocab_size, world_size, schedule, rank) for rank in range(len(schedule.stages))]


def rank_memory(
    config: TrainConfig, vocab_size: int, world_size: int, schedule: PipelineSchedule, rank: int
) -> RankMemory:
    """Memory of pipeline rank ``rank``."""
    parameters = rank_parameters(config, vocab_size, rank)
    weights, gradients, states = state_bytes(config, parameters, world_size)
    activations, again = _activation_peak(config, vocab_size, schedule, rank)
    placement, parallel = pipeline_placement(config), config.parallel
    tp, tokens = parallel.tensor_model_parallel_size, tokens_per_rank(config)
    is_last = rank == placement.last_rank
    columns = config.model.padded_vocab_size(vocab_size, tp) // tp
    copies = config.data_parallel_size(world_size) * parallel.context_parallel_size
    sizes = (tp, placement.pp, parallel.context_parallel_size, copies, parallel.expert_model_parallel_size)
    communication = COMMUNICATOR * sum(size > 1 for size in sizes)
    if parallel.sequence_parallel and tp > 1:
        communication += tokens * config.model.hidden_size * element_bytes(config)
    return RankMemory(
        rank,
        {
            "weights": weights,
            "main_gradients": gradients,
            "optimizer_state": states,
            "activations": activations,
            "recompute": again,
            "logits": tokens * (columns * element_bytes(config) + _own_loss_bytes(config, vocab_size))
            if is_last
            else 0,
            "communication": communication,
            "runtime": RUNTIME,
            "allocator": int(FRAGMENTS * (activations + again)),
        },
    )


def _own_loss_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Bytes per token that a loss of the user's own needs besides this rank's logits.

    The whole vocabulary's, and in float32 a copy, its log-softmax and its gradient, as F.cross_entropy has them.
    """
    if config.hooks.loss_function is None:
        return 0
    gathered = element_bytes(config) if config.parallel.tensor_model_parallel_size > 1 else 0
    return vocab_size * (gathered + 3 * 4)


def state_bytes(config: TrainConfig, own: RankParameters, world_size: int) -> tuple[int, int, int]:
    """Bytes of weights, main gradients and optimizer state on the device."""
    parallel, optimizer = config.parallel, config.optimizer
    copies = config.data_parallel_size(world_size) * parallel.context_parallel_size
    expert_copies = max(1, copies // parallel.expert_model_parallel_size)
    shard = -(-own.dense // copies) + -(-own.experts // expert_copies)
    size = element_bytes(config)
    moments = 4 * len(optimizer.moments)
    masters = 4 if size == 2 else 0
    on_device = 1 - (optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0)
    stage = parallel.zero_stage if copies > 1 else min(parallel.zero_stage, 1)
    if stage >= 2:
        gathered = own.total if stage == 2 else 2 * own.largest_unit
        # A unit's gradients are whole in the model's dtype, and in float32 while they are summed.
        return 4 * shard + size * gathered, 4 * shard + (size + 4) * own.largest_unit, moments * shard
    updated = shard if stage == 1 else own.total
    return size * own.total, 4 * own.total, int(on_device * (masters + moments) * updated)


def _activation_peak(config: TrainConfig, vocab_size: int, schedule: PipelineSchedule, rank: int) -> tuple[int, int]:
    """Peak bytes of the kept activations over the rank's row of the table, and of one replay."""
    layers = partition_layers(config, vocab_size)
    placement = schedule.placement
    own = [stage_bytes(config, layers[placement.virtual_stage(rank, chunk)]) for chunk in range(placement.chunks)]
    held = most = 0
    for action in schedule.stages[rank]:
        if action.kind is ActionKind.FORWARD:
            held += own[action.chunk][0]
            most = max(most, held)
        elif action.kind.frees_activations:
            held -= own[action.chunk][0]
    return most, max(again for _, again in own)
