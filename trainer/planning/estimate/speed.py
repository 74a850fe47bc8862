"""Time of a step: products, attention, memory-bound ops, messages, optimizer, and the table's bubble. Torch-free.

Every term is work over the device's stated share of its data sheet (trainer.planning.estimate.devices). Messages of
tensor and context parallelism are not hidden; those of data parallelism hide behind the last backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from trainer.planning.estimate.activations import element_bytes, tokens_per_rank
from trainer.planning.estimate.devices import HOST_BANDWIDTH, HOST_LINK, MEMORY_SHARE, Device
from trainer.planning.estimate.layer_time import BACKWARD, head_seconds, host_seconds, layer_time, replica_distance
from trainer.planning.estimate.links import Links, RankGroup
from trainer.planning.estimate.memory import micro_batches_of, schedule_of
from trainer.planning.estimate.parameters import RankParameters, copies_of, parameters_of_ranks
from trainer.planning.parts import block
from trainer.planning.pipeline import pipeline_placement, pipeline_schedule, virtual_stages_per_rank
from trainer.planning.schedule import Action, ActionKind, PipelineSchedule, Timeline, timeline
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket of gradients, as trainer.data_parallel.gradient_buckets has them."""
CONTENTION = 0.2
"""Share of a hidden message's time by which computing takes longer: NCCL's kernels hold some of the processors."""
_LONG_PIPELINE = 16
_HOST_MOVED, _HOST_ADAM = 6, 28
"""Bytes per parameter of the offloaded update: gradient and weight over the link; moments, master and gradient."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one iteration.

    Attributes:
        times: start and end of every action of the table.
        exposed: gradient messages that nothing hides.
        optimizer: the update of weights and states.
    """

    times: Timeline
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return self.times.step_time + self.exposed + self.optimizer


def step_time(
    config: TrainConfig, vocab_size: int, world_size: int, schedule: PipelineSchedule, links: Links
) -> StepTime:
    """Time of one iteration of ``config`` on ``world_size`` ranks."""
    durations = stage_durations(config, vocab_size, links)
    placement, device = schedule.placement, links.device

    def duration(rank: int, action: Action) -> float:
        return durations[placement.virtual_stage(rank, action.chunk)][action.kind]

    parallel = config.parallel
    shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    sent = tokens_per_rank(config) * config.model.hidden_size * element_bytes(config) / shards
    latency = links.message(sent, _pp_step(config, world_size)) if placement.pp > 1 else 0.0
    times = timeline(schedule, duration, latency=latency)
    own = max(parameters_of_ranks(config, vocab_size), key=lambda each: each.total)
    hidden = Hidden(
        max(each[ActionKind.FORWARD] for each in durations), max(each[ActionKind.BACKWARD] for each in durations)
    )
    exposed = exposed_seconds(config, own, hidden, schedule.num_micro_batches, world_size, links)
    updated = own.shard(config, world_size) if parallel.zero_stage else own.total
    return StepTime(times, exposed, optimizer_seconds(config, updated, device))


@dataclass(frozen=True)
class Hidden:
    """Seconds of a virtual stage's forward and backward of a micro-batch, which hide messages of data parallelism."""

    forward: float
    backward: float


def exposed_seconds(
    config: TrainConfig, own: RankParameters, hidden: Hidden, micro_batches: int, world_size: int, links: Links
) -> float:
    """Seconds of the messages of data parallelism that no computing hides.

    Args:
        config: of the run.
        own: parameters of a rank.
        hidden: what may hide them.
        micro_batches: of a replica.
        world_size: number of ranks.
        links: between them.
    """
    parallel = config.parallel
    copies, _ = copies_of(config, world_size)
    if copies == 1:
        return 0.0
    group = _copies_group(config, world_size, links)
    others, size = own.total - own.shard(config, world_size), element_bytes(config)
    if parallel.zero_stage >= 2:
        # A unit is a layer.
        units = max(1, config.model.num_layers // parallel.pipeline_model_parallel_size)
        reduce, gather = (_messages(links.collective, each * others, units, group) for each in (4, size))
        if parallel.zero_stage == 2:
            return micro_batches * _left(reduce, hidden.backward, units) + _left(gather, hidden.forward, units)
        both = _left(gather, hidden.forward, units) + _left(reduce + gather, hidden.backward, units)
        return micro_batches * both
    bucket = parallel.ddp_bucket_size or max(_BUCKET, _BUCKET_OF_RANK * copies)
    count = max(1, ceil(own.total / bucket))
    # Interleaved virtual stages begin and end one after the other, each for pp micro-batches.
    chunks = virtual_stages_per_rank(config) if pipeline_schedule(config) == "interleaved" else 1
    stages = parallel.pipeline_model_parallel_size * (chunks - 1) + 1
    size_of_gradient = 2 if config.optimizer.main_grads_dtype == "bf16" else 4
    if parallel.zero_stage == 0:
        reduce = _messages(links.all_reduce, 2 * size_of_gradient * others, count, group)
        return _left(reduce, stages * hidden.backward * parallel.overlap_grad_reduce, count)
    reduce = _messages(links.collective, size_of_gradient * others, count, group)
    gather = _messages(links.collective, size * others, count, group)
    exposed = _left(reduce, stages * hidden.backward * parallel.overlap_grad_reduce, count)
    return exposed + _left(gather, stages * hidden.forward * parallel.overlap_param_gather, count)


def _messages(send: Callable[[float, RankGroup], float], sent: float, count: int, group: RankGroup) -> float:
    """Seconds to send ``sent`` bytes in ``count`` messages."""
    return count * send(sent / count, group)


def _left(messages: float, hidden: float, count: int) -> float:
    """Seconds that ``count`` equal messages add to computing of ``hidden`` seconds, which cannot hide the last one."""
    left = max(messages / count, messages - hidden)
    return left + CONTENTION * (messages - left)


def optimizer_seconds(config: TrainConfig, updated: float, device: Device) -> float:
    """Seconds to update ``updated`` parameters, those in CPU memory beside those on the device."""
    optimizer = config.optimizer
    share = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    # Chunks are copied while others are updated.
    on_host = share * updated * max(_HOST_MOVED / HOST_LINK, _HOST_ADAM / HOST_BANDWIDTH)
    return max(on_host, (1 - share) * 34 * updated / (device.bandwidth * MEMORY_SHARE))


def step_seconds(config: TrainConfig, vocab_size: int, world_size: int, links: Links) -> float:
    """Seconds of one iteration, nearly: with many micro-batches, a short table's time and that of its steady state."""
    pp = config.parallel.pipeline_model_parallel_size
    count = 2 * pp if pp <= _LONG_PIPELINE else pp
    short, long = (
        step_time(config, vocab_size, world_size, schedule_of(config, world_size, most), links).total
        for most in (count, 2 * count)
    )
    return long + max(0, micro_batches_of(config, world_size) - 2 * count) * (long - short) / count


def _pp_step(config: TrainConfig, world_size: int) -> int:
    """Ranks from one stage of a pipeline to the next."""
    parallel = config.parallel
    if parallel.rank_order == "tp-cp-ep-pp-dp":
        return parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return world_size // parallel.pipeline_model_parallel_size


def _copies_group(config: TrainConfig, world_size: int, links: Links) -> RankGroup:
    """Ranks with the same dense parameters."""
    parallel = config.parallel
    replicas = config.data_parallel_size(world_size)
    return links.group(
        (parallel.context_parallel_size, parallel.tensor_model_parallel_size), (replicas, replica_distance(config))
    )


def stage_durations(config: TrainConfig, vocab_size: int, links: Links) -> list[dict[ActionKind, float]]:
    """Seconds of each kind of action of every virtual stage."""
    layers = partition_layers(config, vocab_size)
    placement = pipeline_placement(config)
    found: list[dict[ActionKind, float]] = []
    known = {kind: layer_time(config, own[0], links) for kind, own in block.by_kind(config.model).items()}
    for stage, own in enumerate(layers):
        forward = backward = 0.0
        for layer in own:
            time = known[block.kind_of(config.model, layer)]
            forward, backward = forward + time.forward, backward + time.backward
        host_forward, host_backward = host_seconds(config, links.device)
        forward, backward = max(forward, len(own) * host_forward), max(backward, len(own) * host_backward)
        if stage == placement.num_virtual_stages - 1:
            once = head_seconds(config, vocab_size, links.device)
            # In chunks, backward computes the logits again.
            passes = BACKWARD + (config.training.chunk_of_loss is not None)
            forward, backward = forward + once, backward + passes * once
        found.append(
            {
                ActionKind.FORWARD: forward,
                ActionKind.BACKWARD: backward,
                ActionKind.BACKWARD_INPUT: 0.6 * backward,
                ActionKind.BACKWARD_WEIGHT: 0.4 * backward,
            }
        )
    return found
