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

from trainer.planning.parts import attention, block, embedding, head, mtp
from trainer.planning.pipeline import pipeline_placement

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

FLOPS_PER_BYTE = 10.0
"""1.8 ns per logit equal 160 operations at the speed of the matrix products, for the 16 bytes per logit counted."""


@dataclass(frozen=True)
class PartCosts:
    """Cost of each part of a model, in operations per token.

    Attributes:
        embedding: the input embedding, on the first stage.
        layers: every transformer layer, in order.
        head: output layer, loss and multi-token prediction, on the last stage.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float


def part_costs(config: TrainConfig, vocab_size: int) -> PartCosts:
    """Compute the costs of the config's model with a vocabulary of ``vocab_size`` tokens."""
    model = config.model
    factor = _recompute_factor(config)
    lookup = FLOPS_PER_BYTE * embedding.lookup_bytes(model) + 6 * embedding.parameters(model)
    products = head.table_parameters(model, vocab_size) + head.parameters(model, vocab_size)
    # In chunks, backward computes the logits again.
    passes = 6.0 if config.training.chunk_of_loss is None else 8.0
    logits = passes * products + FLOPS_PER_BYTE * head.logit_bytes(vocab_size)
    known = {kind: factor * _layer_cost(config, own[0]) for kind, own in block.by_kind(model).items()}
    layers = tuple(known[block.kind_of(model, layer)] for layer in range(model.num_layers))
    further = layers[-1] + 6 * mtp.merge_parameters(model)
    return PartCosts(
        embedding=lookup,
        layers=layers,
        head=logits + model.mtp_num_layers * (logits + lookup + further),
    )


def _layer_cost(config: TrainConfig, layer: int) -> float:
    model = config.model
    products = 6 * block.parameters(model, layer, active=True)
    scores = attention.score_cost(model, layer, config.training.seq_length)
    return products + scores + FLOPS_PER_BYTE * block.passed_bytes(model, layer)


def _recompute_factor(config: TrainConfig) -> float:
    """Cost factor of a layer: full recompute adds a forward, a third."""
    training = config.training
    if training.recompute_granularity != "full":
        return 1.0
    if training.recompute_method != "block":
        return 4 / 3
    recomputed = (training.recompute_num_layers or 1) * pipeline_placement(config).num_virtual_stages
    return 1.0 + min(1.0, recomputed / config.model.num_layers) / 3
