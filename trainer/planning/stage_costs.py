"""Costs of the parts of a model, for balancing pipeline stages. Torch-free.

Unit: floating-point operations per token of forward and backward, as in trainer.planning.flops, without division by
tp and cp, which divide all parts alike. A memory-bound part costs ``FLOPS_PER_BYTE`` operations for each byte moved
between memory and processor, in float32.

The numbers were measured on one x86 core in float32 (AMD EPYC, torch 2.13): medians of process CPU time for forward
and backward of each part alone, in two models with SwiGLU layers (see benchmarks/peers/workload.py).

                                     tiny: 256 wide, 256 tokens, 4096 words   small: 512 wide, 512 tokens, 32000 words
    matrix products of a layer       78 GFLOP/s                               91 GFLOP/s
    attention, undiscounted          56 GFLOP/s                               59 GFLOP/s
    a layer                          39 ms                                    138 to 142 ms
    head and loss                    42 to 43 ms, 1.01 to 1.11 layers         540 to 590 ms, 4.0 to 4.3 layers
    look-up                          0.3 ms, 0.007 layers                     0.7 ms, 0.005 layers

The training device is not known here. An accelerator does more operations per byte, so that loss and activations cost
relatively more there than assumed. If this matters, set explicit layer counts or a stage layout
(trainer.planning.stage_partition). Costs per iteration are ignored: the optimizer's passes over the tables, and
zeroing the gradient of the input table.
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
"""1.8 ns per logit equal 160 operations at the speed of the matrix products, for the 16 bytes counted below."""
ATTENTION_TILE = 512
"""Tokens within which attention kernels gain nothing from the causal mask.

Counted without a discount for the mask, attention takes 1.4 to 1.5 times as long as matrix products of equal FLOPs for
256 or 512 tokens, and 1.07 times for 2048: the mask's savings and the kernel's lower efficiency cancel out.
"""
LOGIT_BYTES = 4 * 4
"""Bytes per logit: one read and write in forward (exponential), one in backward (gradient).

All forward passes over a block of logits stay in the cache (trainer.model.tensor_parallel.cross_entropy).
"""
LOOKUP_BYTES = 5 * 4
"""Bytes per channel: forward reads and writes a row; backward reads its gradient and adds it to the table's.

Only the rows looked up are touched (trainer.data_parallel.main_gradient.MainGradient.add_rows).
"""
HIDDEN_BYTES = 30 * 4
"""Bytes per channel and layer: two norms (10 passes), two residual sums (12), rotary positions (8)."""
GATED_BYTES, PLAIN_BYTES = 8 * 4, 5 * 4
"""Bytes per feed-forward unit: the activation reads inputs and writes outputs, in forward and in backward."""


@dataclass(frozen=True)
class PartCosts:
    """Cost of each part of a model, in operations per token.

    Attributes:
        embedding: the input embedding, on the first stage.
        layers: every transformer layer, in order.
        head: output layer and loss, on the last stage.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float


def part_costs(config: TrainConfig, vocab_size: int) -> PartCosts:
    """Compute the costs of the config's model with a vocabulary of ``vocab_size`` tokens."""
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
    """Feed-forward width of one layer, summed over the experts that process a token."""
    if not model.is_moe_layer(layer):
        return model.ffn_size
    return model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)


def _recompute_factor(config: TrainConfig) -> float:
    """Cost factor of a layer: full recompute adds a forward, a third."""
    training = config.training
    if training.recompute_granularity != "full":
        return 1.0
    if training.recompute_method != "block":
        return 4 / 3
    recomputed = (training.recompute_num_layers or 1) * pipeline_placement(config).num_virtual_stages
    return 1.0 + min(1.0, recomputed / config.model.num_layers) / 3
