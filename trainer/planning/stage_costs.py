"""What each part of a model costs a pipeline stage, so that stages can be balanced. Torch-free.

Unit: floating-point operations per token of forward and backward, as in trainer.planning.flops, without division over
tp and cp, which divide all parts alike. What is bound by memory instead weighs ``FLOPS_PER_BYTE`` operations per byte.
That is a processor with one multiply-add per three to five bytes; an accelerator moves fewer bytes per operation, but
there the softmax passes also have fewer, and matrix products dominate. Measured on two x86 cores in float32: the loss
over 32,000 classes takes 27 operations per byte by this account, and a block as long as its matrix products with the
attention counted without the causal discount, which thus stands for its norms, activations and residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.flops import active_layer_parameters

if TYPE_CHECKING:
    from trainer.config import TrainConfig

FLOPS_PER_BYTE = 25.0
SOFTMAX_BYTES = 5 * 4
"""Per logit: the largest is sought, exponentials are summed, the gradient is formed from them: 5 passes of float32."""
TABLE_BYTES = 2 * 4
"""Per element of the input table and micro-batch: its gradient is dense, hence written and added whole, in float32."""


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
    model, training = config.model, config.training
    table = vocab_size * model.hidden_size
    tokens = training.micro_batch_size * training.seq_length // config.parallel.context_parallel_size
    attention = 12 * model.num_attention_heads * model.head_dim * training.seq_length
    factor = _recompute_factor(config)
    return PartCosts(
        embedding=FLOPS_PER_BYTE * TABLE_BYTES * table / max(1, tokens),
        layers=tuple(
            (6 * active_layer_parameters(model, layer) + attention) * factor for layer in range(model.num_layers)
        ),
        head=6.0 * table + FLOPS_PER_BYTE * SOFTMAX_BYTES * vocab_size,
    )


def _recompute_factor(config: TrainConfig) -> float:
    """A layer that is computed again costs a second forward, a third of forward and backward; the head never is."""
    training = config.training
    if training.recompute_granularity != "full":
        return 1.0
    if training.recompute_method != "block":
        return 4 / 3
    recomputed = (training.recompute_num_layers or 1) * config.placement.num_virtual_stages
    return 1.0 + min(1.0, recomputed / config.model.num_layers) / 3
