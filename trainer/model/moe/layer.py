"""A mixture of experts in place of a block's feed-forward part.

Legend: S this rank's part of the sequence, B micro-batch, T = S*B, H hidden, E experts, K experts chosen per token;
``/t`` = divided over tp.

Every tp rank sees all tokens of its part of the micro-batch, and computes its slice of every expert that they pass
through, including the shared expert. The router's weights multiply these partial sums before the sum over tp; without a
last bias they multiply the input of the experts' last matrix product instead. So between
*f* and *g* every gradient is a partial sum over tp: the gradient of the tokens, which f completes, and the gradient of
the router's weight.

Where fewer ranks than tp divide an expert, every tp rank still routes all tokens, so that losses and capacity are those
of any layout, but brings only its share of them to the experts, on ranks of any tp. Results of whole experts need no
sum over tp: under sequence parallelism they are its shard already, and otherwise the sum only puts the tokens together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.sections.scales import matrix_std
from trainer.model.mlp import MLP
from trainer.model.moe.capacity import kept_choices
from trainer.model.moe.dispatch import Dispatch, from_experts, to_experts, weights_to_experts
from trainer.model.moe.experts import Experts
from trainer.model.moe.losses import attach_loss, auxiliary_losses
from trainer.model.moe.router import Router, Routing
from trainer.model.moe.router_numbers import RouterNumbers
from trainer.model.tensor_parallel.collectives import enter_parallel_region, reduce_partial_sums

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.model.context import ForwardPass, ParallelAxes
    from trainer.model.sharding import ParameterBuilder


class MoE(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H] through K of E experts per token.

    A shared expert is added if the model has one, times its gate if there is one.
    """

    def __init__(
        self, model: ModelConfig, builder: ParameterBuilder, axes: ParallelAxes, recompute_activation: bool = False
    ):
        """Build the layer; with ``recompute_activation`` backward recomputes the input of the experts' fc2."""
        super().__init__()
        assert model.num_experts is not None
        self._model, self._num_experts = model, model.num_experts
        self._axes = axes
        self._kernels = builder.kernels
        self.router = Router(model, builder.under("router"), axes.cp)
        self.numbers = RouterNumbers(model, builder)
        self._divided = axes.tp.size // axes.ep.shares
        self.experts = Experts(model, builder.under("experts"), self._divided, recompute_activation)
        self.shared_expert: MLP | None = None
        if model.moe_shared_expert_intermediate_size is not None:
            self.shared_expert = MLP(
                model, builder.under("shared_expert"), axes.tp, model.moe_shared_expert_intermediate_size
            )
        self.shared_expert_gate: nn.Parameter | None = None
        if model.moe_shared_expert_gate:
            # Each tp rank only knows the loss gradient through its own part of the shared expert.
            self.shared_expert_gate = builder.under("shared_expert_gate").weight(
                "weight", (1, model.hidden_size), std=matrix_std(model), partial_over_tp=True
            )

    @property
    def output_bias(self) -> nn.Parameter | None:
        """[H], the bias added to the output: the shared expert's."""
        return None if self.shared_expert is None else self.shared_expert.output_bias

    def forward(
        self, hidden: torch.Tensor, forward_pass: ForwardPass, needs_values: bool = True, *, adds_bias: bool = True
    ) -> torch.Tensor:
        """Collective: all ranks of the layer's axes. For ``needs_values`` see trainer.model.recompute.Recomputable.

        Without ``adds_bias`` the next op adds ``output_bias``.
        """
        whole = enter_parallel_region(hidden, self._axes.tp)  # [S, B, H]
        tokens = whole.flatten(0, 1)  # [T, H]
        routing: Routing = self.router(tokens, forward_pass.limits_experts)
        weights = self._with_losses(routing, whole.shape[1], forward_pass.aux_loss_scale)
        kept = self._within_capacity(routing, whole.shape[:2]) if forward_pass.limits_experts else None
        if self._axes.ep.shares == 1:
            routed = self._through_experts(tokens, routing.experts, weights, kept)
            return self._summed(whole, routed.view(whole.shape), needs_values, adds_bias)
        own = self._own_tokens(len(tokens))
        mine = (routing.experts[own], weights[own], None if kept is None else kept[own])
        routed = self._through_experts(tokens[own], *mine)
        if self._axes.tp.sequence_parallel and self._divided == 1:
            return self._beside(whole, routed.view(hidden.shape), needs_values, adds_bias)
        # The sum over tp puts the parts together, and adds what ranks that divide an expert have of each.
        padded = F.pad(routed, (0, 0, own.start, len(tokens) - own.stop))
        return self._summed(whole, padded.view(whole.shape), needs_values, adds_bias)

    def _own_tokens(self, count: int) -> slice:
        """The tokens that this tp rank brings to the experts; of whole ones, those of its shard of the sequence."""
        share, shares = self._axes.tp.rank // self._divided, self._axes.ep.shares
        return slice(count * share // shares, count * (share + 1) // shares)

    def _through_experts(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, H] from tokens [T, H], their experts and weights [T, K]. Collective: all ep ranks."""
        dispatch = Dispatch.plan(
            experts,
            kept,
            self._num_experts,
            self._axes.ep,
            has_grouped_kernel=self.experts.has_grouped_kernel(tokens),
        )
        rows = to_experts(tokens, dispatch, self._kernels)
        # If the experts multiply by the weights themselves, backward does not need their outputs.
        row_weights = weights_to_experts(weights, dispatch) if self.experts.takes_weights else None
        outputs = self.experts(rows, dispatch.offsets, row_weights)
        return from_experts(outputs, weights if row_weights is None else None, dispatch, self._kernels)

    def _summed(self, whole: torch.Tensor, routed: torch.Tensor, needs_values: bool, adds_bias: bool) -> torch.Tensor:
        """The sum over tp of partial sums [S, B, H], with those of the shared expert: one f and one g serve both."""
        if self.shared_expert is None:
            return reduce_partial_sums(routed, self._axes.tp, needs_values)
        combined = routed + self._shared_partial(whole, needs_values)
        summed = reduce_partial_sums(combined, self._axes.tp, needs_values)
        return self.shared_expert.fc2.add_bias(summed) if adds_bias else summed

    def _beside(self, whole: torch.Tensor, routed: torch.Tensor, needs_values: bool, adds_bias: bool) -> torch.Tensor:
        """Finished sums [S/t, B, H], with the shared expert's."""
        if self.shared_expert is None:
            return routed
        summed = routed + reduce_partial_sums(self._shared_partial(whole, needs_values), self._axes.tp, needs_values)
        return self.shared_expert.fc2.add_bias(summed) if adds_bias else summed

    def _shared_partial(self, whole: torch.Tensor, needs_values: bool) -> torch.Tensor:
        assert self.shared_expert is not None
        gate = self.shared_expert_gate
        # The backward of the gate reads the values that it multiplies.
        shared: torch.Tensor = self.shared_expert(whole, needs_values or gate is not None, inside_tp_region=True)
        return shared if gate is None else shared * torch.sigmoid(F.linear(whole, gate))

    def _with_losses(self, routing: Routing, batch_size: int, scale: float) -> torch.Tensor:
        if scale == 0.0 or not torch.is_grad_enabled():
            return routing.weights
        losses = auxiliary_losses(routing, batch_size, self._model, self._axes.cp)
        # A layer that is computed again in backward has run without gradients first: every token counts once.
        self.numbers.add(routing.experts, losses, self._axes.cp.size)
        if not losses:
            return routing.weights
        loss = torch.stack(list(losses.values())).sum()
        # Every tp rank has the full gradient, not a partial sum, and the sum over tp includes it too.
        return attach_loss(routing.weights, loss, scale / self._axes.tp.size)

    def _within_capacity(self, routing: Routing, shape: torch.Size) -> torch.Tensor | None:
        model = self._model
        if model.moe_expert_capacity_factor is None:
            return None
        experts, weights = (choices.view(*shape, -1) for choices in (routing.experts, routing.weights))
        kept = kept_choices(
            experts,
            weights,
            self._num_experts,
            model.moe_expert_capacity_factor,
            model.moe_token_drop_policy,
            self._axes.cp,
        )
        return kept.flatten(0, 1)
