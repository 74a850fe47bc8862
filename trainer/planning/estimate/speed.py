"""Time of a step: products, attention, memory-bound ops, messages, optimizer, and the table's bubble. Torch-free.

Every term is work over the device's stated share of its data sheet (trainer.planning.estimate.devices). Messages of
tensor and context parallelism are not hidden; those of data parallelism hide behind the last backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.estimate.activations import EXPERT_LOAD, element_bytes, tokens_per_rank
from trainer.planning.estimate.devices import LINK_SHARE, MEMORY_SHARE, Device
from trainer.planning.estimate.parameters import rank_parameters
from trainer.planning.parts import attention, block, head
from trainer.planning.pipeline import pipeline_placement
from trainer.planning.schedule import Action, ActionKind, PipelineSchedule, Timeline, timeline
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_LATENCY = 20e-6
_BACKWARD = 2.0
"""Time of a backward product in forwards: the gradients of inputs and of weights."""
_ATTENTION_BACKWARD = 2.5


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
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    shards = tp if parallel.sequence_parallel else 1
    sent = tokens_per_rank(config) * config.model.hidden_size * element_bytes(config) / shards
    latency = links.seconds(sent, 2 * _pp_step(config, world_size)) if placement.pp > 1 else 0.0
    times = timeline(schedule, duration, latency=latency)
    copies = config.data_parallel_size(world_size) * cp
    own = max(rank_parameters(config, vocab_size, rank).total for rank in range(placement.pp))
    exposed = 0.0
    if copies > 1:
        moved = (4 + (element_bytes(config) if parallel.zero_stage else 4)) * own * (copies - 1) / copies
        hidden = durations[-1][ActionKind.BACKWARD] if parallel.overlap_grad_reduce else 0.0
        exposed = max(0.0, links.seconds(moved, _copies_span(config, world_size)) - hidden)
        if parallel.zero_stage == 3:
            exposed += _gathers(config, own * (copies - 1) / copies, durations, schedule.num_micro_batches, links)
    updated = own / (copies if parallel.zero_stage else 1)
    return StepTime(times, exposed, 34 * updated / (device.bandwidth * MEMORY_SHARE))


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


def _gathers(
    config: TrainConfig, others: float, durations: list[dict[ActionKind, float]], micro_batches: int, links: Links
) -> float:
    """Seconds of ZeRO-3's gathers, twice for each micro-batch, that the longest stage's computing does not hide."""
    parallel = config.parallel
    span = parallel.tensor_model_parallel_size * links.per_node
    sent = links.seconds(2 * others * element_bytes(config), span)
    busy = max(each[ActionKind.FORWARD] + each[ActionKind.BACKWARD] for each in durations)
    return micro_batches * max(0.0, sent - busy)


def stage_durations(config: TrainConfig, vocab_size: int, links: Links) -> list[dict[ActionKind, float]]:
    """Seconds of each kind of action of every virtual stage."""
    layers = partition_layers(config, vocab_size)
    placement, again = pipeline_placement(config), config.training.recompute_granularity == "full"
    found: list[dict[ActionKind, float]] = []
    known: dict[tuple[bool, int | None], tuple[float, float]] = {}
    for stage, own in enumerate(layers):
        forward = inputs = 0.0
        for layer in own:
            key = (config.model.is_moe_layer(layer), config.model.window_of(layer))
            if key not in known:
                known[key] = layer_seconds(config, layer, links)
            forward, inputs = forward + known[key][0], inputs + known[key][1]
        backward = inputs + (forward if again else 0.0)
        if stage == placement.num_virtual_stages - 1:
            once = _head_seconds(config, vocab_size, links.device)
            forward, backward = forward + once, backward + _BACKWARD * once
        found.append(
            {
                ActionKind.FORWARD: forward,
                ActionKind.BACKWARD: backward,
                ActionKind.BACKWARD_INPUT: 0.6 * backward,
                ActionKind.BACKWARD_WEIGHT: 0.4 * backward,
            }
        )
    return found


def layer_seconds(config: TrainConfig, layer: int, links: Links) -> tuple[float, float]:
    """Seconds of a layer's forward and backward for one micro-batch."""
    model, device, tokens = config.model, links.device, tokens_per_rank(config)
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    size = element_bytes(config)
    load = EXPERT_LOAD if model.is_moe_layer(layer) and config.parallel.expert_model_parallel_size > 1 else 1.0
    products = 2 * block.parameters(model, layer, active=True) * tokens / tp * load
    # A third of forward and backward; causal kernels skip half.
    scores = attention.score_flops(model, layer, config.training.seq_length) * tokens / tp / 6
    memory = block.passed_bytes(model, layer) * tokens * size / 4 / tp / (device.bandwidth * MEMORY_SHARE)
    forward = products / (device.peak * device.product_share) + memory / 3
    backward = _BACKWARD * products / (device.peak * device.product_share) + memory * 2 / 3
    scored = scores / (device.peak * device.attention_share)
    message = 0.0
    if tp > 1:
        message += 2 * links.seconds(2 * tokens * model.hidden_size * size * (tp - 1) / tp, tp)
    if cp > 1:
        message += links.seconds(2 * tokens * model.query_groups * model.head_dim / tp * size * (cp - 1), tp * cp) / 2
    ep = config.parallel.expert_model_parallel_size
    if ep > 1 and model.is_moe_layer(layer):
        message += 2 * links.seconds(tokens * model.moe_router_topk * model.hidden_size * size / tp, _ep_span(config))
    return forward + scored + message, backward + _ATTENTION_BACKWARD * scored + message


def _ep_span(config: TrainConfig) -> int:
    parallel = config.parallel
    cp, ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    between = parallel.rank_order == "tp-cp-ep-pp-dp" and ep > cp
    stages = parallel.pipeline_model_parallel_size if between else 1
    return parallel.tensor_model_parallel_size * cp * ep * stages


def _head_seconds(config: TrainConfig, vocab_size: int, device: Device) -> float:
    """Seconds of the forward of output layer and loss."""
    tokens, tp = tokens_per_rank(config), config.parallel.tensor_model_parallel_size
    products = 2 * (head.table_parameters(config.model, vocab_size) + head.parameters(config.model, vocab_size))
    moved = head.logit_bytes(vocab_size) / 4 * element_bytes(config) / 3
    return tokens / tp * (products / (device.peak * device.product_share) + moved / (device.bandwidth * MEMORY_SHARE))
