"""What each part of a model costs a pipeline stage per micro-batch, so that stages can be balanced. Torch-free.

Unit: floating-point operations per token of forward and backward, as in trainer.planning.flops, without division over
tp and cp, which divide all parts alike. What is bound by memory instead weighs ``FLOPS_PER_BYTE`` operations for each
byte that passes between memory and processor, in float32.

The figures are those of one x86 core in float32 (AMD EPYC, torch 2.13): medians of process CPU time for forward and
backward of each part alone, in two models of SwiGLU layers (see benchmarks/peers/workload.py).

                                     tiny: 256 wide, 256 tokens, 4096 words   small: 512 wide, 512 tokens, 32000 words
    matrix products of a layer       78 GFLOP/s                               91 GFLOP/s
    attention, undiscounted          56 GFLOP/s                               59 GFLOP/s
    a layer                          39 ms                                    138 to 142 ms
    head and loss                    42 to 43 ms, 1.01 to 1.11 layers         540 to 590 ms, 4.0 to 4.3 layers
    look-up                          0.3 ms, 0.007 layers                     0.7 ms, 0.005 layers

Which device will train is not known here. An accelerator does more operations in the time of a byte, so that there loss
and activations weigh more than is assumed; where that matters, explicit counts or a layout say otherwise
(trainer.planning.stage_partition). What happens once per iteration is not weighed: the optimizer's passes over the
tables, and filling the gradient of the input table with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.flops import active_layer_parameters
from trainer.planning.pipeline import pipeline_placement

if TYPE_CHECKING:
    from trainer.config.sections import ModelConfig
    from trainer.config.train_config import TrainConfig

FLOPS_PER_BYTE = 10.0
"""1.8 ns per logit are 160 operations at the speed of the matrix products, for the 16 bytes counted below."""
ATTENTION_TILE = 512
"""Tokens within which kernels of attention gain nothing from the causal mask.

Measured beside matrix products, and counted without a discount for the mask, attention takes 1.4 to 1.5 times as long
for 256 or 512 tokens and 1.07 times for 2048: what the mask saves and what a less regular kernel loses cancel out.
"""
LOGIT_BYTES = 4 * 4
"""Per logit: read and written in forward, where it becomes an exponential, and again where that becomes its gradient.

All passes of forward over a chunk of logits happen in the cache (trainer.model.tensor_parallel.cross_entropy).
"""
LOOKUP_BYTES = 5 * 4
"""Per channel: a row is read and written in forward, its gradient read and added to a row of the table's in backward.

Only the rows that are looked up are touched (trainer.data_parallel.main_gradient.MainGradient.add_rows).
"""
HIDDEN_BYTES = 30 * 4
"""Per channel and layer: two norms (10 passes), two residual sums (12), rotary positions of queries and keys (8)."""
GATED_BYTES, PLAIN_BYTES = 8 * 4, 5 * 4
"""Per unit of the feed-forward width: an activation reads its inputs and writes its output, and again in backward."""


@dataclass(frozen=True)
class PartCosts:
    """Operations per token of each part of a model.

    Attributes:
        embedding: of the first stage.
        layers: of every transformer layer, in order.
        head: of the last stage: output layer and loss.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float


def part_costs(config: TrainConfig, vocab_size: int) -> PartCosts:
    """The costs of the parts of the model that ``config`` describes, with a vocabulary of ``vocab_size`` tokens."""
    model = config.model
    factor = _recompute_factor(config)
    return PartCosts(
        embedding=FLOPS_PER_BYTE * LOOKUP_BYTES * model.hidden_size,
        layers=tuple(factor * _layer_cost(config, layer) for layer in range(model.num_layers)),
        head=vocab_size * (6.0 * model.hidden_size + FLOPS_PER_BYTE * LOGIT_BYTES),
    )


def _layer_cost(config: TrainConfig, layer: int) -> float:
    model, length = config.model, config.training.seq_length
    attention = 12 * model.num_attention_heads * model.head_dim * length * (1 + min(1.0, ATTENTION_TILE / length) / 2)
    passed = HIDDEN_BYTES * model.hidden_size
    passed += (GATED_BYTES if model.swiglu else PLAIN_BYTES) * _active_width(model, layer)
    return 6 * active_layer_parameters(model, layer) + attention + FLOPS_PER_BYTE * passed


def _active_width(model: ModelConfig, layer: int) -> int:
    """Feed-forward units of one layer that a token passes through."""
    if not model.is_moe_layer(layer):
        return model.ffn_size
    return model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)


def _recompute_factor(config: TrainConfig) -> float:
    """A layer that is computed again costs a second forward, a third of forward and backward; the head never is."""
    training = config.training
    if training.recompute_granularity != "full":
        return 1.0
    if training.recompute_method != "block":
        return 4 / 3
    recomputed = (training.recompute_num_layers or 1) * pipeline_placement(config).num_virtual_stages
    return 1.0 + min(1.0, recomputed / config.model.num_layers) / 3
