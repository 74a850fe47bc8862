"""Sinkhorn's normalisation of the router's products, by which tokens choose experts evenly.

Legend: T tokens of this rank's part of the micro-batch, E experts.
Clark et al. 2022 (arXiv:2202.01169), section 3.1, S-BASE; as Megatron-LM's sinkhorn
(megatron/core/transformer/moe/moe_utils.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from trainer.model.context_parallel.axis import ContextParallel

# Megatron-LM's: the mean change of the experts' factors at which the iterations end, and a guard of divisions.
_TOLERANCE = 1e-4
_EPSILON = 1e-8
# Some ten iterations are usual. Where some expert is hardly any token's, the guard of divisions lets all factors drift
# together for many thousands, which hardly changes a choice; Megatron-LM has no bound.
_MOST_ITERATIONS = 1000


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """exp(logits) with rows and columns scaled to equal sums: float64 [T, E].

    The columns run over all tokens of the micro-batch, as those of the load balancing loss do, so that every layout
    chooses the same experts. In Megatron-LM each tp and cp rank normalises its own tokens, and sequence parallelism
    changes the choices. Float64 keeps the number of iterations from depending on the order of sums.

    Collective: all cp ranks. Every iteration synchronizes a GPU.
    """
    cost = logits.to(torch.float64).exp()
    num_tokens, num_experts = cost.shape[0] * cp.size, cost.shape[1]
    of_experts = cost.new_ones(num_experts)
    of_tokens = cost.new_ones(len(cost))
    for _ in range(_MOST_ITERATIONS):
        of_tokens = 1 / (num_tokens * (cost @ of_experts + _EPSILON))
        sums = of_tokens @ cost
        if cp.group is not None:
            dist.all_reduce(sums, group=cp.group)
        before, of_experts = of_experts, 1 / (num_experts * (sums + _EPSILON))
        if not float((before - of_experts).abs().mean()) > _TOLERANCE:
            break
    return of_experts * cost * of_tokens.unsqueeze(1)
