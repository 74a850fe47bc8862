"""The auxiliary losses of a router.

Only their gradients take part: ``lm_loss`` excludes them. Rows show each without its coefficient, as Megatron-LM does:
the mean over micro-batches, replicas and layers with experts.

Legend: T tokens of the whole micro-batch, all of its S x B whatever the layout and the loss mask; E experts, K experts
chosen per token.

- Load balancing: E * sum_i f_i P_i, where f_i is the fraction of the T*K choices that fell on expert i, before any is
  dropped, and P_i the mean over the T tokens of the router's share for expert i. Uniform routing has loss 1. Fedus et
  al. 2021 (arXiv:2101.03961), equation 4, with the choices counted as in Lepikhin et al. 2020 (arXiv:2006.16668),
  section 2.2, for any K; as Megatron-LM's switch_load_balancing_loss_func.
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


def coefficients(model: ModelConfig) -> dict[str, float]:
    """The model's auxiliary losses by Megatron-LM's names, with their coefficients."""
    found = {}
    if model.num_experts is not None and model.moe_router_load_balancing_type == "aux_loss":
        found["load_balancing_loss"] = model.moe_aux_loss_coeff
    if model.num_experts is not None and model.moe_z_loss_coeff:
        found["z_loss"] = model.moe_z_loss_coeff
    return {name: factor for name, factor in found.items() if factor > 0.0}


def auxiliary_losses(routing: Routing, model: ModelConfig, cp: ContextParallel) -> dict[str, torch.Tensor]:
    """This rank's part of each of one layer's auxiliary losses of a micro-batch: scalars with their coefficients.

    The sum over cp is the loss of the whole micro-batch, and the sum of the gradients is its gradient. Empty if the
    model has no such losses. Collective: all cp ranks.
    """
    num_tokens = len(routing.experts) * cp.size
    factors, losses = coefficients(model), {}
    if "load_balancing_loss" in factors:
        losses["load_balancing_loss"] = load_balancing_loss(routing, num_tokens, cp) * factors["load_balancing_loss"]
    if "z_loss" in factors:
        losses["z_loss"] = routing.logits.logsumexp(1).square().sum() * (factors["z_loss"] / num_tokens)
    return losses


def load_balancing_loss(routing: Routing, num_tokens: int, cp: ContextParallel) -> torch.Tensor:
    """This rank's part of the load balancing loss over ``num_tokens`` tokens.

    Collective: all cp ranks.
    """
    num_experts, topk = routing.shares.shape[1], routing.experts.shape[1]
    experts = torch.arange(num_experts, device=routing.experts.device)
    counts = (routing.experts.unsqueeze(-1) == experts).sum((0, 1))
    if cp.group is not None:
        dist.all_reduce(counts, group=cp.group)
    return (routing.shares.sum(0) * counts).sum() * (num_experts / (topk * num_tokens**2))


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
