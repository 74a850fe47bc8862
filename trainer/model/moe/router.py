"""The router: the experts that a token passes through, and their weights.

Legend: T tokens of this rank's part of the micro-batch, H hidden, E experts, K experts chosen per token.
Shazeer et al. 2017 (arXiv:1701.06538), section 2.1, without the noise; the forms of the scores are those of
Megatron-LM's flags (megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function). Groups of experts:
DeepSeek-V2 (arXiv:2405.04434), section 2.2.2; a bias for the choice only: DeepSeek-V3 (arXiv:2412.19437), section
2.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.config.sections.scales import matrix_std
from trainer.model.moe.expert_bias import ExpertBias
from trainer.model.moe.sinkhorn import sinkhorn

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.model.context_parallel.axis import ContextParallel
    from trainer.model.sharding import ParameterBuilder
    from trainer.model.tensor_parallel.linear import WeightGradientAccumulator

# Prevents division by zero in the normalisation of sigmoid scores, as in Megatron-LM.
_EPSILON = 1e-20


@dataclass(frozen=True)
class Routing:
    """Result of the router for T tokens.

    All but ``experts`` are float32 or wider, and have gradients.

    Attributes:
        experts: int64 [T, K], the chosen ones, best first, expert bias included; the lower number wins a tie.
        weights: [T, K], factors of the experts' outputs.
        logits: [T, E].
        shares: [T, E], scores of all experts, which sum to 1 for every token; the load balancing loss reads them.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    shares: torch.Tensor


class _Logits(torch.autograd.Function):
    """``tokens @ weight^T`` in float32; keeps the tokens in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, accumulator: WeightGradientAccumulator | None
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.accumulator = accumulator
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        return tokens.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        tokens, weight = ctx.saved_tensors
        grad_weight = None
        if ctx.accumulator is not None:
            # Detached and not yet cast: an accumulator may defer the product, and must keep neither graph nor copy.
            ctx.accumulator.add_outer(grad_logits, tokens.detach())
        else:
            grad_weight = (grad_logits.t() @ tokens.to(grad_logits.dtype)).to(weight.dtype)
        return (grad_logits @ weight.to(grad_logits.dtype)).to(tokens.dtype), grad_weight, None


class Router(nn.Module):
    """[T, H] -> Routing, the same on every tp rank."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, cp: ContextParallel):
        super().__init__()
        assert model.num_experts is not None
        self._topk = model.moe_router_topk
        self._is_sigmoid = model.router_score_function == "sigmoid"
        self._softmax_first = model.router_pre_softmax
        self._has_sinkhorn = model.moe_router_load_balancing_type == "sinkhorn"
        self._cp = cp
        self._divides_by_sum = model.moe_router_norm_topk_prob and self._topk > 1
        self._scaling = model.moe_router_topk_scaling_factor
        self._groups, self._group_topk = model.moe_router_num_groups, model.moe_router_group_topk
        self._sums_two = model.moe_router_group_score == "top2"
        # Each tp rank only knows the loss gradient through its own slice of the experts.
        self.weight = builder.weight(
            "weight", (model.num_experts, model.hidden_size), std=matrix_std(model), partial_over_tp=True
        )
        self.bias: nn.Parameter | None = None
        if model.moe_router_bias:
            self.bias = builder.vector(
                "bias", (model.num_experts,), value=0.0, on_sequence_shard=False, partial_over_tp=True
            )
        self.expert_bias: ExpertBias | None = None
        if model.moe_router_enable_expert_bias:
            self.expert_bias = ExpertBias(model, builder)
        self.gradient_accumulator: WeightGradientAccumulator | None = None
        """Receives the weight gradient instead of ``weight.grad``."""

    def forward(self, tokens: torch.Tensor, is_training: bool = False) -> Routing:
        """With ``is_training`` sinkhorn decides, and the load counts for the next move of the expert bias.

        Collective: all cp ranks, if sinkhorn decides; else no communication.
        """
        logits: torch.Tensor = _Logits.apply(tokens, self.weight, self.gradient_accumulator)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        scores = torch.sigmoid(logits) if self._is_sigmoid else torch.softmax(logits, dim=1)
        experts = self._choose(logits.detach(), scores.detach(), is_training)
        # A layer that is computed again in backward has run without gradients first: every token counts once.
        if self.expert_bias is not None and is_training and torch.is_grad_enabled():
            self.expert_bias.count(experts)
        weights, shares = (self._sigmoid if self._is_sigmoid else self._softmax)(logits, scores, experts)
        if self._scaling is not None:
            weights = weights * self._scaling
        return Routing(experts, weights, logits, shares)

    def _choose(self, logits: torch.Tensor, scores: torch.Tensor, is_training: bool) -> torch.Tensor:
        """Numbers of the chosen experts [T, K]."""
        # Both scores grow with the logits. The logits decide, because sigmoids near 1 have lost their differences. The
        # sort is stable, so that ties break alike on every device and in every layout.
        order = sinkhorn(logits, self._cp) if self._has_sinkhorn and is_training else logits
        if self.expert_bias is not None:
            order = scores = scores + self.expert_bias.values
        if self._groups is not None:
            order = order.masked_fill(~self._in_best_groups(scores if self._sums_two else order), -torch.inf)
        return torch.sort(order, dim=1, descending=True, stable=True).indices[:, : self._topk].contiguous()

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Mask bool [T, E] of the experts that may be chosen."""
        grouped = scores.view(len(scores), self._groups or 1, -1)
        each = grouped.topk(2, dim=2).values.sum(2) if self._sums_two else grouped.amax(2)
        best = torch.sort(each, dim=1, descending=True, stable=True).indices[:, : self._group_topk]
        is_best = torch.zeros_like(each, dtype=torch.bool).scatter_(1, best, True)
        return is_best.unsqueeze(2).expand_as(grouped).flatten(1)

    def _softmax(
        self, logits: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._softmax_first:
            return shares.gather(1, experts), shares
        return torch.softmax(logits.gather(1, experts), dim=1), shares

    def _sigmoid(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del logits
        weights = scores.gather(1, experts)
        if self._divides_by_sum:
            weights = weights / (weights.sum(1, keepdim=True) + _EPSILON)
        return weights, scores / (scores.sum(1, keepdim=True) + _EPSILON)
