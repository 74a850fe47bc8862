"""Expert bias: added to the router's scores for the choice of experts only, and moved against their load.

Legend: E experts, K experts chosen per token, T tokens of this rank's part of the micro-batch.
Wang et al. 2024 (arXiv:2408.15664), algorithm 1; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.model.sharding import ParameterBuilder


class ExpertBias(nn.Module):
    """The bias of one layer, and the load of its experts since the last move.

    Attributes:
        values: float32 [E], no parameter: the optimizer does not see it; checkpoints hold it as ``expert_bias``.
        load: int64 [E], choices of this rank's tokens, before any is dropped.
    """

    values: torch.Tensor
    load: torch.Tensor

    def __init__(self, model: ModelConfig, builder: ParameterBuilder):
        super().__init__()
        assert model.num_experts is not None
        self.rate = model.moe_router_bias_update_rate
        self.register_buffer("values", builder.buffer("expert_bias", (model.num_experts,)), persistent=False)
        load = torch.zeros(model.num_experts, dtype=torch.int64, device=builder.device)
        self.register_buffer("load", load, persistent=False)

    def count(self, experts: torch.Tensor) -> None:
        """Add the choices [T, K] to the load. No communication."""
        numbers = torch.arange(len(self.load), device=experts.device)
        self.load += (experts.unsqueeze(-1) == numbers).sum((0, 1))


@torch.no_grad()
def move_expert_biases(stages: Iterable[nn.Module], group: dist.ProcessGroup | None, *, was_skipped: bool) -> None:
    """Move each bias by rate * sign(mean load - load of the expert), and begin to count again.

    Collective: all ranks of ``group``.

    Args:
        stages: this rank's part of the model.
        group: the ranks with the same dense parameters, over whose tokens the load is summed; None for one rank.
        was_skipped: the optimizer has skipped its step; the biases then stay, too.
    """
    biases = [module for stage in stages for module in stage.modules() if isinstance(module, ExpertBias)]
    if not biases:
        return
    if not was_skipped:
        loads = torch.stack([bias.load for bias in biases])
        if group is not None:
            dist.all_reduce(loads, group=group)
        # E * load against the sum: whole numbers, so that an expert with exactly the mean load stays.
        moves = (loads.sum(1, keepdim=True) - loads * loads.shape[1]).sign()
        for bias, move in zip(biases, moves, strict=True):
            bias.values += bias.rate * move
    for bias in biases:
        bias.load.zero_()
