"""The auxiliary losses of a router.

Only their gradients take part: ``lm_loss`` excludes them. Rows show each without its coefficient, as Megatron-LM does:
the mean over micro-batches, replicas and layers with experts.

Legend: B sequences of the micro-batch; T tokens of the whole micro-batch, all of its S x B whatever the layout and the
loss mask; E experts, K experts chosen per token.

- Load balancing: E * sum_i f_i P_i, where f_i is the fraction of the T*K choices that fell on expert i, before any is
  dropped, and P_i the mean over the T tokens of the router's share for expert i. Uniform routing has loss 1. Fedus et
  al. 2021 (arXiv:2101.03961), equation 4, with the choices counted as in Lepikhin et al. 2020 (arXiv:2006.16668),
  section 2.2, for any K; as Megatron-LM's switch_load_balancing_loss_func.
- Load balancing of sequences (seq_aux_loss): the mean over the B sequences of the same loss of each sequence's tokens.
  DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, equations 17 to 20.
- z-loss: the mean over the T tokens of logsumexp(logits)^2. Zoph et al. 2022 (arXiv:2202.08906), equation 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.model.context_parallel.axis import ContextParallel
    from trainer.model.moe.router import Routing


LOSSES_OF_LOAD = ("aux_loss", "seq_aux_loss")
"""Values of moe_router_load_balancing_type that are a loss."""


def coefficients(model: ModelConfig) -> dict[str, float]:
    """The model's auxiliary losses by Megatron-LM's names, with their coefficients."""
    found = {}
    if model.num_experts is not None and model.moe_router_load_balancing_type in LOSSES_OF_LOAD:
        found["load_balancing_loss"] = model.moe_aux_loss_coeff
    if model.num_experts is not None and model.moe_z_loss_coeff:
        found["z_loss"] = model.moe_z_loss_coeff
    return {name: factor for name, factor in found.items() if factor > 0.0}


def auxiliary_losses(
    routing: Routing, batch_size: int, model: ModelConfig, cp: ContextParallel
) -> dict[str, torch.Tensor]:
    """This rank's part of each of one layer's auxiliary losses of a micro-batch: scalars with their coefficients.

    The tokens of ``batch_size`` sequences alternate, as in [S, B]. The sum over cp is the loss of the micro-batch, and
    the sum of the gradients is its gradient. Empty if the model has no such losses. Collective: all cp ranks.
    """
    num_tokens = len(routing.experts) * cp.size
    factors, losses = coefficients(model), {}
    if "load_balancing_loss" in factors:
        by_sequence = model.moe_router_load_balancing_type == "seq_aux_loss"
        balance = load_balancing_loss(routing, num_tokens, cp, batch_size if by_sequence else 1)
        losses["load_balancing_loss"] = balance * factors["load_balancing_loss"]
    if "z_loss" in factors:
        losses["z_loss"] = routing.logits.logsumexp(1).square().sum() * (factors["z_loss"] / num_tokens)
    return losses


def load_balancing_loss(routing: Routing, num_tokens: int, cp: ContextParallel, num_groups: int = 1) -> torch.Tensor:
    """This rank's part of the load balancing loss over ``num_tokens`` tokens.

    The mean over ``num_groups`` equal groups of tokens; token t is of group t modulo ``num_groups``.
    Collective: all cp ranks.
    """
    num_experts, topk = routing.shares.shape[1], routing.experts.shape[1]
    experts = torch.arange(num_experts, device=routing.experts.device)
    chosen = (routing.experts.unsqueeze(-1) == experts).sum(1)  # [T, E]
    counts = chosen.view(-1, num_groups, num_experts).sum(0)
    if cp.group is not None:
        dist.all_reduce(counts, group=cp.group)
    shares = routing.shares.view(-1, num_groups, num_experts).sum(0)
    # A group has num_tokens / num_groups tokens, and the mean divides by num_groups.
    return (shares * counts).sum() * (num_experts * num_groups / (topk * num_tokens**2))


class _AttachLoss(torch.autograd.Function):
    """Identity in forward; backward adds the gradient of a second loss."""

    @staticmethod
    def forward(ctx: Any, carrier: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad_carrier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad_carrier, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None


def attach_loss(carrier: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
    """``carrier``, whose backward also minimises ``scale * loss``."""
    attached: torch.Tensor = _AttachLoss.apply(carrier, loss, scale)  # type: ignore[no-untyped-call]
    return attached
