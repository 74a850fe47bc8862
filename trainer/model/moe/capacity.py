"""Expert capacity: a limit of tokens per expert, and the dropped choices.

Legend: S sequence, B micro-batch, T = S*B tokens, E experts, K experts chosen per token; ``/c`` = divided over cp.
Capacity is counted over the whole micro-batch, so that every layout drops the same choices. It limits training only.
In evaluation nothing is dropped: otherwise a token's result would depend on its neighbours, on later tokens and on
padding (Zoph et al. 2022, arXiv:2202.08906, section 4, let experts take more in evaluation than in training).
Megatron-LM drops in evaluation as in training. Lepikhin et al. 2020
(arXiv:2006.16668), section 2.2; the two policies are those of Megatron-LM's --moe-token-drop-policy, except that
``position`` drops the latest choices here, while Megatron-LM drops those that torch.topk leaves among equals.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from trainer.model.context_parallel.axis import ContextParallel

TokenDropPolicy = Literal["probs", "position"]


def expert_capacity(num_choices: int, num_experts: int, factor: float) -> int:
    """Tokens that one expert takes of ``num_choices`` = T*K.

    The capacity is ``factor`` times an even share, rounded up.
    """
    return math.ceil(num_choices / num_experts * factor)


def within_capacity(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int, capacity: int, policy: TokenDropPolicy
) -> torch.Tensor:
    """Mask bool [T, K] of the choices that are kept.

    Args:
        experts: int64 [T, K], tokens in the order of their positions.
        weights: [T, K], of the same choices.
        num_experts: E.
        capacity: maximum number of choices that each expert keeps.
        policy: ``probs`` keeps the choices with the largest weights, the earlier of equal ones; ``position`` keeps
            the earliest.
    """
    flat = experts.flatten()
    order = torch.arange(len(flat), device=flat.device)
    if policy == "probs":
        order = weights.detach().flatten().sort(descending=True, stable=True).indices
    chosen, by_expert = flat[order].sort(stable=True)
    starts = torch.searchsorted(chosen, torch.arange(num_experts, device=flat.device))
    place = torch.arange(len(flat), device=flat.device) - starts[chosen]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order[by_expert]] = place < capacity
    return kept.view_as(experts)


def kept_choices(
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    factor: float,
    policy: TokenDropPolicy,
    cp: ContextParallel,
) -> torch.Tensor:
    """Mask, shaped as ``experts``, of this rank's choices that are kept.

    Collective: all cp ranks.

    Args:
        experts: int64 [S/c, B, K].
        weights: [S/c, B, K], of the same choices.
        num_experts: E.
        factor: capacity of an expert, as a multiple of an even share of the micro-batch's choices.
        policy: see ``within_capacity``.
        cp: the cp axis.
    """
    whole_experts, whole_weights = cp.gather(experts), cp.gather(weights.detach())
    capacity = expert_capacity(whole_experts.numel(), num_experts, factor)
    kept = within_capacity(
        whole_experts.flatten(0, 1), whole_weights.flatten(0, 1), num_experts, capacity, policy
    ).view_as(whole_experts)
    return cp.shard(kept, 0)
