"""Seconds of a layer and of the output layer: products, attention, memory-bound ops, messages. Torch-free.

Every term is work over the device's stated share of its data sheet (trainer.planning.estimate.devices).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.estimate.activations import element_bytes, tokens_per_rank
from trainer.planning.estimate.devices import MEMORY_SHARE, Device
from trainer.planning.estimate.parameters import layer_parameters
from trainer.planning.kernel_choice import requested_backends
from trainer.planning.parts import attention, block, head

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.planning.estimate.links import Links, RankGroup

BACKWARD = 2.0
"""Time of a backward product in forwards: the gradients of inputs and of weights."""
_ATTENTION_BACKWARD = 2.5 * 1.3
"""Five products instead of two, in kernels that reach less: cuDNN's and flash attention's on an H100
(benchmarks/results/gpu-2026-11-26.md)."""
_BUSIEST = 1.2
"""Tokens of the busiest rank's experts by an even share, in the mean of layers and micro-batches: an assumption. The
memory has to hold more once (trainer.planning.estimate.activations.EXPERT_LOAD)."""
HALF_HEAD = 16
"""Head width at which attention kernels reach half of what they do with wide heads."""
_SCORE_BYTES, _DROPPED_SCORE_BYTES = 8, 13
"""Bytes that pass the memory per score of unfused attention in forward: four times a 16-bit one, and with dropout six
times and its mask. Backward passes twice as many."""
_ALIGNED = 8
"""Head widths that it does not divide keep unfused attention from 16-bit products: BLOOM's models took 1.34 times as
long with heads of 108 channels as with 216 (bigscience-workshop/bigscience, chronicles-prequel.md)."""
_REFERENCE_LOSS = 32
"""Further bytes that pass the memory per logit without a fused cross entropy: about eight passes over float32."""


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
    attended, units = _product_seconds(config, layer, device)
    moved, moved_back = _weight_seconds(config, layer, device)
    memory = block.passed_bytes(model, layer) * tokens * element_bytes(config) / 4 / tp
    memory /= device.bandwidth * MEMORY_SHARE
    scored, scored_back = _attention_seconds(config, layer, device)
    message = _message_seconds(config, layer, links)
    around, around_back = _ring_seconds(config, links, scored, scored_back)
    forward = attended + units + memory / 3 + scored + moved + message + around
    backward = BACKWARD * (attended + units) + memory * 2 / 3 + scored_back + moved_back + message + around_back
    again = 0.0
    if training.recompute_granularity == "full":
        # Backward has gathered the weights already.
        again = forward - moved
    elif training.recompute_granularity == "selective":
        selected = set(training.recompute_modules or ["core_attn"])
        again = scored if "core_attn" in selected else 0.0
        if ("moe" if model.is_moe_layer(layer) else "mlp") in selected:
            again += units + memory / 3
        elif selected & {"mlp_act", "moe_act", "layernorm"}:
            again += memory / 3
    return LayerTime(forward, backward + again, 2 * message + around + around_back, again)


def host_seconds(config: TrainConfig, device: Device) -> tuple[float, float]:
    """Seconds in which the host starts the kernels of a layer's forward and backward, beside the device."""
    again = config.training.recompute_granularity == "full"
    return device.host, (2 + again) * device.host


def head_seconds(config: TrainConfig, vocab_size: int, device: Device) -> float:
    """Seconds of the forward of output layer and loss."""
    tokens, tp = tokens_per_rank(config), config.parallel.tensor_model_parallel_size
    products = head.table_parameters(config.model, vocab_size) + head.parameters(config.model, vocab_size)
    moved = head.logit_bytes(vocab_size) / 4 * element_bytes(config) / 3
    if requested_backends(config)["cross_entropy"].backend == "reference":
        moved += _REFERENCE_LOSS * vocab_size / 3
    rate = _rate(config, device) * share_of(min(tokens, config.model.hidden_size, vocab_size // tp), device.half_size)
    return tokens / tp * (2 * products / rate + moved / (device.bandwidth * MEMORY_SHARE))


def share_of(size: float, half: float) -> float:
    """Share of the speed of large sizes that ``size`` reaches."""
    return size / (size + half)


def _rate(config: TrainConfig, device: Device) -> float:
    """Operations per second of large products."""
    return device.rate(bf16=config.training.bf16, fp16=config.training.fp16) * device.product_share


def _product_seconds(config: TrainConfig, layer: int, device: Device) -> tuple[float, float]:
    """Seconds of the matrix products of a layer's forward: of attention, and of the feed-forward part.

    The busiest rank of expert parallelism waits for more tokens than the mean rank, but only in its own experts.
    """
    rate = _rate(config, device)

    return (
        sum(each.seconds(rate, device) for each in _attention_products(config)),
        sum(each.seconds(rate, device) for each in _feed_forward_products(config, layer)),
    )


@dataclass(frozen=True)
class _Product:
    """A matrix product, or several of equal size: rows of the input and its width, columns, and number of products."""

    rows: float
    inner: int
    columns: int
    count: int = 1

    def seconds(self, rate: float, device: Device) -> float:
        """Seconds at ``rate`` operations per second of large products."""
        share = share_of(min(self.rows, self.inner, self.columns), device.half_size)
        return 2 * self.count * self.rows * self.inner * self.columns / rate / share


def _attention_products(config: TrainConfig) -> Iterator[_Product]:
    model, tokens, tp = config.model, tokens_per_rank(config), config.parallel.tensor_model_parallel_size
    width, groups = model.num_attention_heads * model.head_dim // tp, max(1, model.query_groups // tp) * model.head_dim
    yield _Product(tokens, model.hidden_size, width + 2 * groups)
    yield _Product(tokens, width, model.hidden_size)


def _feed_forward_products(config: TrainConfig, layer: int) -> Iterator[_Product]:
    model, parallel, tokens = config.model, config.parallel, tokens_per_rank(config)
    tp = parallel.tensor_model_parallel_size
    if not model.is_moe_layer(layer):
        yield from _unit_products(config, tokens, model.ffn_size // tp)
        return
    experts, ep = model.num_experts or 1, parallel.expert_model_parallel_size
    load = min(_BUSIEST, model.moe_expert_capacity_factor or _BUSIEST) if ep > 1 else 1.0
    routed = tokens * model.moe_router_topk * load / parallel.expert_shares
    own = experts // ep
    yield from _unit_products(config, routed / own, model.expert_ffn_size // parallel.expert_tp, own)
    yield _Product(tokens, model.hidden_size, experts)
    if model.moe_shared_expert_intermediate_size:
        yield from _unit_products(config, tokens, model.moe_shared_expert_intermediate_size // tp)


def _unit_products(config: TrainConfig, rows: float, own: int, count: int = 1) -> Iterator[_Product]:
    model = config.model
    yield _Product(rows, model.hidden_size, (2 if model.is_gated else 1) * own, count)
    yield _Product(rows, own, model.hidden_size, count)


def _attention_seconds(config: TrainConfig, layer: int, device: Device) -> tuple[float, float]:
    """Seconds of attention without its products with weights, of a layer's forward and backward."""
    model, training, tokens = config.model, config.training, tokens_per_rank(config)
    tp = config.parallel.tensor_model_parallel_size
    # A third of forward and backward.
    products = attention.score_flops(model, layer, training.seq_length) * tokens / tp / 3
    products *= sum(attention.kernel_widths(model)) / sum(attention.widths(model))
    rate = device.rate(bf16=training.bf16, fp16=training.fp16)
    if model.attention_backend not in ("unfused", "local"):
        # Causal kernels skip half.
        kernel = device.flash_share if model.attention_backend == "flash" else device.attention_share
        forward = products / 2 / rate / kernel / share_of(model.head_dim, HALF_HEAD)
        return forward, _ATTENTION_BACKWARD * forward
    share = device.product_share * share_of(model.head_dim, device.half_size)
    if model.head_dim % _ALIGNED:
        rate, share = min(rate, device.single), device.product_share
    scores = tokens * training.seq_length * model.num_attention_heads / tp
    each = (_DROPPED_SCORE_BYTES if model.attention_dropout else _SCORE_BYTES) * element_bytes(config) / 2
    moved = scores * each / (device.bandwidth * MEMORY_SHARE)
    return products / rate / share + moved, 2 * (products / rate / share + moved)


def _weight_seconds(config: TrainConfig, layer: int, device: Device) -> tuple[float, float]:
    """Seconds in which a layer's weights and gradients are copied, in forward and backward of a micro-batch.

    fully_shard copies gathered weights out of one buffer and gradients into another, as float32. Otherwise a product
    adds to the main gradient itself, unless that is turned off: then the gradient is read, and the main one changed.
    """
    parallel, size = config.parallel, element_bytes(config)
    forward = backward = 0
    if parallel.zero_stage >= 2:
        gathered = 2 * size if parallel.zero_stage == 3 else 0
        forward, backward = gathered, gathered + size + 4
    elif parallel.no_gradient_accumulation_fusion:
        backward = size + 8
    seconds = sum(layer_parameters(config, layer)) / (device.bandwidth * MEMORY_SHARE)
    return forward * seconds, backward * seconds


def _message_seconds(config: TrainConfig, layer: int, links: Links) -> float:
    """Seconds of the messages of a layer's forward that nothing hides, as long as those of its backward."""
    model, parallel = config.model, config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    stream = tokens_per_rank(config) * model.hidden_size * element_bytes(config)
    message = 0.0
    if tp > 1:
        # A gather and a sum around attention and around the feed-forward part; whole experts need no sum.
        shared = model.moe_shared_expert_intermediate_size is not None
        is_summed = not (parallel.has_whole_experts and parallel.sequence_parallel and model.is_moe_layer(layer))
        message += (4 if is_summed or shared else 3) * links.collective(stream * (tp - 1) / tp, links.group((tp, 1)))
    if cp > 1 and parallel.cp_comm_type == "a2a":
        sent = 2 * tokens_per_rank(config) * (model.num_attention_heads + model.query_groups) * model.head_dim / tp
        message += links.exchange(sent * element_bytes(config) * (cp - 1) / cp, links.group((cp, tp)))
    if parallel.expert_model_parallel_size > 1 and model.is_moe_layer(layer):
        group = expert_group(config, links)
        sent = stream * model.moe_router_topk / parallel.expert_shares * (group.size - 1) / group.size
        message += 2 * links.exchange(sent, group)
    return message


def _ring_seconds(config: TrainConfig, links: Links, scored: float, scored_back: float) -> tuple[float, float]:
    """Seconds for which attention waits for keys and values from its neighbour, in forward and backward."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    if cp == 1 or config.parallel.cp_comm_type == "a2a":
        return 0.0, 0.0
    groups = max(1, config.model.query_groups // tp)
    keys = 2 * tokens_per_rank(config) * groups * config.model.head_dim * element_bytes(config)
    # The slowest hop is that between two nodes, if there is one.
    distance = links.per_node if tp * cp > links.per_node else tp
    step = links.message(keys, distance)
    # Backward passes the gradients on too.
    return (cp - 1) * max(0.0, step - scored / cp), (cp - 1) * max(0.0, 2 * step - scored_back / cp)


def expert_group(config: TrainConfig, links: Links) -> RankGroup:
    """Ranks over which the experts of a layer are divided."""
    parallel = config.parallel
    tp, cp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    near = min(parallel.expert_shares, ep)
    inner = min(cp, ep // near)
    return links.group((near, parallel.expert_tp), (inner, tp), (ep // near // inner, replica_distance(config)))


def replica_distance(config: TrainConfig) -> int:
    """Ranks from one replica to the next."""
    parallel = config.parallel
    own = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return own * (parallel.pipeline_model_parallel_size if parallel.rank_order == "tp-cp-ep-pp-dp" else 1)
