"""Time of a step: products, attention, memory-bound ops, messages, optimizer, and the table's bubble. Torch-free.

Every term is work over the device's stated share of its data sheet (trainer.planning.estimate.devices). Messages of
tensor and context parallelism are not hidden; those of data parallelism hide behind the last backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.estimate.activations import EXPERT_LOAD, element_bytes, tokens_per_rank
from trainer.planning.estimate.devices import HOST_BANDWIDTH, HOST_LINK, LINK_SHARE, MEMORY_SHARE, Device
from trainer.planning.estimate.memory import micro_batches_of, schedule_of
from trainer.planning.estimate.parameters import parameters_of_ranks
from trainer.planning.parts import attention, block, feed_forward, head
from trainer.planning.pipeline import pipeline_placement
from trainer.planning.schedule import Action, ActionKind, PipelineSchedule, Timeline, timeline
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_LATENCY = 20e-6
_BACKWARD = 2.0
"""Time of a backward product in forwards: the gradients of inputs and of weights."""
_ATTENTION_BACKWARD = 2.5
_LONG_PIPELINE = 16
_HOST_MOVED, _HOST_ADAM = 6, 28
"""Bytes per parameter of the offloaded update: gradient and weight over the link; moments, master and gradient."""


@dataclass(frozen=True)
class Links:
    """Sizes that decide the link of a message."""

    per_node: int
    device: Device

    def seconds(self, sent: float, span: int) -> float:
        """Seconds to send ``sent`` bytes per rank among ranks that lie within ``span`` neighbours."""
        speed = self.device.within if span <= self.per_node else self.device.between
        return _LATENCY + sent / (speed * LINK_SHARE)


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
    latency = links.seconds(sent, 2 * _pp_step(config, world_size)) if placement.pp > 1 else 0.0
    times = timeline(schedule, duration, latency=latency)
    own = max(each.total for each in parameters_of_ranks(config, vocab_size))
    busy = max(each[ActionKind.FORWARD] + each[ActionKind.BACKWARD] for each in durations)
    exposed = exposed_seconds(
        config, own, (durations[-1][ActionKind.BACKWARD], busy), schedule.num_micro_batches, world_size, links
    )
    copies = config.data_parallel_size(world_size) * parallel.context_parallel_size
    return StepTime(times, exposed, optimizer_seconds(config, own / (copies if parallel.zero_stage else 1), device))


def exposed_seconds(
    config: TrainConfig, own: float, hidden: tuple[float, float], micro_batches: int, world_size: int, links: Links
) -> float:
    """Seconds of the messages of data parallelism that no computing hides.

    Args:
        config: of the run.
        own: parameters of a rank.
        hidden: seconds of the backward that hides the gradients' messages, and of the stage that hides the gathers
            of ZeRO-3's weights.
        micro_batches: of a replica.
        world_size: number of ranks.
        links: between them.
    """
    parallel = config.parallel
    copies = config.data_parallel_size(world_size) * parallel.context_parallel_size
    if copies == 1:
        return 0.0
    others = own * (copies - 1) / copies
    moved = (4 + (element_bytes(config) if parallel.zero_stage else 4)) * others
    backward = hidden[0] if parallel.overlap_grad_reduce else 0.0
    exposed = max(0.0, links.seconds(moved, _copies_span(config, world_size)) - backward)
    if parallel.zero_stage == 3:
        # Twice for each micro-batch.
        span = parallel.tensor_model_parallel_size * links.per_node
        exposed += micro_batches * max(0.0, links.seconds(2 * others * element_bytes(config), span) - hidden[1])
    return exposed


def optimizer_seconds(config: TrainConfig, updated: float, device: Device) -> float:
    """Seconds to update ``updated`` parameters, those in CPU memory beside those on the device."""
    optimizer = config.optimizer
    share = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    on_host = share * updated * (_HOST_MOVED / HOST_LINK + _HOST_ADAM / HOST_BANDWIDTH)
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


def _copies_span(config: TrainConfig, world_size: int) -> int:
    """Neighbouring ranks among which are those with the same dense parameters."""
    parallel = config.parallel
    if parallel.rank_order == "tp-cp-ep-pp-dp" and config.data_parallel_size(world_size) > 1:
        return world_size
    return world_size // parallel.pipeline_model_parallel_size


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
        if stage == placement.num_virtual_stages - 1:
            once = head_seconds(config, vocab_size, links.device)
            # In chunks, backward computes the logits again.
            passes = _BACKWARD + (config.training.chunk_of_loss is not None)
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


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer for one micro-batch.

    Attributes:
        forward: with its messages.
        backward: with its messages and all that is computed again.
        messages: of tensor, context and expert parallelism, in both.
        again: of backward, what is computed again.
    """

    forward: float
    backward: float
    messages: float
    again: float


def layer_time(config: TrainConfig, layer: int, links: Links) -> LayerTime:
    """Time of layer number ``layer``."""
    model, training, device, tokens = config.model, config.training, links.device, tokens_per_rank(config)
    tp = config.parallel.tensor_model_parallel_size
    products = _product_seconds(config, layer, device)
    memory = block.passed_bytes(model, layer) * tokens * element_bytes(config) / 4 / tp
    memory /= device.bandwidth * MEMORY_SHARE
    # A third of forward and backward; causal kernels skip half.
    scores = attention.score_flops(model, layer, training.seq_length) * tokens / tp / 6
    scored = scores / (_rate(config, device) * device.attention_share)
    message = _message_seconds(config, layer, links)
    forward = sum(products) + memory / 3 + scored + message
    backward = _BACKWARD * sum(products) + memory * 2 / 3 + _ATTENTION_BACKWARD * scored + message
    again = 0.0
    if training.recompute_granularity == "full":
        again = forward
    elif training.recompute_granularity == "selective":
        selected = set(training.recompute_modules or ["core_attn"])
        again = scored if "core_attn" in selected else 0.0
        if ("moe" if model.is_moe_layer(layer) else "mlp") in selected:
            again += products[1] + memory / 3
        elif selected & {"mlp_act", "moe_act", "layernorm"}:
            again += memory / 3
    return LayerTime(forward, backward + again, 2 * message, again)


def _product_seconds(config: TrainConfig, layer: int, device: Device) -> tuple[float, float]:
    """Seconds of the matrix products of a layer's forward: of attention and router, and of the feed-forward part.

    The busiest rank of expert parallelism waits for more tokens than the mean rank, but only in its own experts.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    units = float(feed_forward.parameters(model, layer, active=True))
    others = block.parameters(model, layer, active=True) - units
    if model.is_moe_layer(layer) and config.parallel.expert_model_parallel_size > 1:
        each = feed_forward.dense_parameters(model, model.expert_ffn_size)
        units += (EXPERT_LOAD - 1) * model.moe_router_topk * each
    rate = _rate(config, device) * device.product_share
    seconds = 2 * tokens_per_rank(config) / tp / rate
    return others * seconds, units * seconds


def _message_seconds(config: TrainConfig, layer: int, links: Links) -> float:
    """Seconds of the messages of a layer's forward, as long as those of its backward."""
    model, tokens, size = config.model, tokens_per_rank(config), element_bytes(config)
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    message = 0.0
    if tp > 1:
        message += 2 * links.seconds(2 * tokens * model.hidden_size * size * (tp - 1) / tp, tp)
    if cp > 1:
        message += links.seconds(2 * tokens * model.query_groups * model.head_dim / tp * size * (cp - 1), tp * cp) / 2
    ep = config.parallel.expert_model_parallel_size
    if ep > 1 and model.is_moe_layer(layer):
        message += 2 * links.seconds(tokens * model.moe_router_topk * model.hidden_size * size / tp, _ep_span(config))
    return message


def _ep_span(config: TrainConfig) -> int:
    parallel = config.parallel
    cp, ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    between = parallel.rank_order == "tp-cp-ep-pp-dp" and ep > cp
    stages = parallel.pipeline_model_parallel_size if between else 1
    return parallel.tensor_model_parallel_size * cp * ep * stages


def head_seconds(config: TrainConfig, vocab_size: int, device: Device) -> float:
    """Seconds of the forward of output layer and loss."""
    tokens, tp = tokens_per_rank(config), config.parallel.tensor_model_parallel_size
    products = 2 * (head.table_parameters(config.model, vocab_size) + head.parameters(config.model, vocab_size))
    moved = head.logit_bytes(vocab_size) / 4 * element_bytes(config) / 3
    rate = _rate(config, device) * device.product_share
    return tokens / tp * (products / rate + moved / (device.bandwidth * MEMORY_SHARE))


def _rate(config: TrainConfig, device: Device) -> float:
    return device.rate(bf16=config.training.bf16, fp16=config.training.fp16)
