"""Memory of every pipeline rank over a step, item by item. Torch-free.

Sources in the trainer: data_parallel/gradient_buckets.py and sharded_buckets.py (weights, main gradients),
fully_sharded.py (ZeRO-2 and 3), optimizer/masters.py and cpu_offload.py (states), pipeline/executor.py (activations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.estimate.activations import backward_bytes, element_bytes, stage_bytes, tokens_per_rank
from trainer.planning.estimate.devices import GPU_OVERHEAD, Overhead
from trainer.planning.estimate.parameters import RankParameters, copies_of, parameters_of_ranks
from trainer.planning.kernel_choice import requested_backends
from trainer.planning.parts import block
from trainer.planning.parts.embedding import word_width
from trainer.planning.pipeline import pipeline_placement, pipeline_schedule
from trainer.planning.schedule import ActionKind, PipelineSchedule, build_schedule
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


_REFERENCE_LOSS = 6
"""Further bytes of a 16-bit logit without a fused cross entropy: a float32 copy, and a gradient of its own."""
_BESIDE_LOGITS = 7
"""Streams that a last stage holds at the peak beside what its layers keep: inputs and gradients of the final norm and
of the output layer, and of the layer that backward begins with. As traced."""

ITEMS = (
    *("weights", "main_gradients", "optimizer_state", "activations", "recompute", "logits", "backward"),
    *("communication", "runtime", "allocator"),
)
STATES, TENSORS = ITEMS[:3], ITEMS[:7]


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
    def tensors(self) -> int:
        """Peak of the tensors, as torch counts what is allocated."""
        return sum(self.bytes_of[item] for item in TENSORS)

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state: a lower bound of any run."""
        return sum(self.bytes_of[item] for item in STATES)


def schedule_of(config: TrainConfig, world_size: int, most: int | None = None) -> PipelineSchedule:
    """The schedule table that will run; with ``most`` as many micro-batches if there are more."""
    placement, count = pipeline_placement(config), micro_batches_of(config, world_size)
    kind = pipeline_schedule(config)
    return build_schedule(kind, placement.pp, placement.chunks, count if most is None else min(count, most))


def micro_batches_of(config: TrainConfig, world_size: int) -> int:
    """Micro-batches of a replica, of the largest batch of the run."""
    dp = config.data_parallel_size(world_size)
    return config.batch_sizes(dp).largest // (config.training.micro_batch_size * dp)


def peak_schedule(config: TrainConfig, world_size: int) -> PipelineSchedule:
    """A table with the peaks of the one that will run, and few micro-batches where these keep as much.

    With more than two micro-batches per stage no schedule keeps more, but for gpipe, and for interleaved with groups
    of unequal sizes.
    """
    kind, pp = pipeline_schedule(config), pipeline_placement(config).pp
    is_uneven = kind == "interleaved" and micro_batches_of(config, world_size) % pp
    return schedule_of(config, world_size, None if kind == "gpipe" or is_uneven else 2 * pp)


def memory_of_ranks(
    config: TrainConfig, vocab_size: int, world_size: int, overhead: Overhead = GPU_OVERHEAD
) -> list[RankMemory]:
    """Memory of each pipeline rank; the ranks of a pipeline rank differ only by the load of their experts."""
    schedule = peak_schedule(config, world_size)
    chunks = [stage_bytes(config, layers) for layers in partition_layers(config, vocab_size)]
    return [
        _rank_memory(
            config, vocab_size, world_size, rank, parameters, _activation_peak(chunks, schedule, rank), overhead
        )
        for rank, parameters in enumerate(parameters_of_ranks(config, vocab_size))
    ]


def _rank_memory(
    config: TrainConfig,
    vocab_size: int,
    world_size: int,
    rank: int,
    parameters: RankParameters,
    kept: tuple[int, int],
    overhead: Overhead,
) -> RankMemory:
    """Memory of pipeline rank ``rank``.

    Args:
        config: of the run.
        vocab_size: token ids.
        world_size: number of ranks.
        rank: pipeline rank.
        parameters: of the rank.
        kept: bytes of activations at their peak, and of one replay.
        overhead: of the device.
    """
    weights, gradients, states = state_bytes(config, parameters, world_size)
    activations, again = kept
    is_last = rank == pipeline_placement(config).last_rank
    logits = _logits_bytes(config, vocab_size) if is_last else 0
    backward = max(backward_bytes(config, own[0]) for own in block.by_kind(config.model).values())
    # When backward reaches the layers, the gradient of the logits is gone: the greater of the two moments counts.
    if logits >= again + backward:
        again = backward = 0
    else:
        logits = 0
    return RankMemory(
        rank,
        {
            "weights": weights,
            "main_gradients": gradients,
            "optimizer_state": states,
            "activations": activations,
            "recompute": again,
            "logits": logits,
            "backward": backward,
            "communication": communication_bytes(config, world_size, overhead),
            "runtime": overhead.runtime,
            "allocator": int(overhead.fragments * (activations + again + logits + backward)),
        },
    )


def communication_bytes(config: TrainConfig, world_size: int, overhead: Overhead) -> int:
    """Bytes of the communicators, and of the tokens that sequence parallelism gathers."""
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    copies = config.data_parallel_size(world_size) * cp
    found = overhead.communicator * sum(size > 1 for size in (tp, pp, cp, copies, parallel.expert_model_parallel_size))
    if parallel.sequence_parallel and tp > 1:
        found += tokens_per_rank(config) * config.model.hidden_size * element_bytes(config)
    return found


def _logits_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Bytes of the logits that a rank of the last stage holds at once, and of the streams beside them.

    In chunks, the gradient of the output layer's whole input is held beside those of a chunk.
    """
    tokens, tp, size = tokens_per_rank(config), config.parallel.tensor_model_parallel_size, element_bytes(config)
    columns = config.model.padded_vocab_size(vocab_size, tp) // tp
    of_token = columns * size + _own_loss_bytes(config, vocab_size)
    if size == 2 and requested_backends(config)["cross_entropy"].backend == "reference":
        of_token += columns * _REFERENCE_LOSS
    shards = tp if config.parallel.sequence_parallel else 1
    beside = _BESIDE_LOGITS * tokens * config.model.hidden_size * size // shards
    chunk = config.training.chunk_of_loss
    if chunk is None:
        return tokens * of_token + beside
    return min(tokens, chunk) * of_token + tokens * word_width(config.model) * size + beside


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
    copies, expert_copies = copies_of(config, world_size)
    shard = -(-own.dense // copies) + -(-own.experts // expert_copies)
    size = element_bytes(config)
    moments = sum(map(optimizer.moment_bytes, optimizer.moments))
    masters = optimizer.master_bytes if size == 2 else 0
    on_device = 1 - (optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0)
    stage = parallel.zero_stage if copies > 1 else min(parallel.zero_stage, 1)
    if stage >= 2:
        gathered = own.total if stage == 2 else 2 * own.largest_unit
        # A unit's gradients are whole in the model's dtype, and in float32 while they are summed.
        return 4 * shard + size * gathered, 4 * shard + (size + 4) * own.largest_unit, moments * shard
    updated = shard if stage == 1 else own.total
    gradients = 2 if optimizer.main_grads_dtype == "bf16" else 4
    return size * own.total, gradients * own.total, int(on_device * (masters + moments) * updated)


def _activation_peak(chunks: Sequence[tuple[int, int]], schedule: PipelineSchedule, rank: int) -> tuple[int, int]:
    """Peak bytes of the kept activations over the rank's row of the table, and of one replay.

    Args:
        chunks: stage_bytes of each virtual stage.
        schedule: the table.
        rank: pipeline rank.
    """
    placement = schedule.placement
    own = [chunks[placement.virtual_stage(rank, chunk)] for chunk in range(placement.chunks)]
    held = most = 0
    for action in schedule.stages[rank]:
        if action.kind is ActionKind.FORWARD:
            held += own[action.chunk][0]
            most = max(most, held)
        elif action.kind.frees_activations:
            held -= own[action.chunk][0]
    return most, max(again for _, again in own)
