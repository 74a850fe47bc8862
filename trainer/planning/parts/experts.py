"""Mixture of experts: router, experts, shared expert. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import mlp

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def parameters(model: ModelConfig, *, active: bool) -> int:
    """Parameters of one layer: of all experts, or of those that one token passes through.

    The bias that only chooses experts is no parameter: no gradient reaches it.
    """
    count = model.num_experts or 0
    router = (model.hidden_size + model.moe_router_bias) * count
    shared = model.moe_shared_expert_intermediate_size
    each = mlp.parameters(model, model.expert_ffn_size)
    experts = (model.moe_router_topk if active else count) * each
    return router + experts + (mlp.parameters(model, shared) if shared else 0)


def activation_bytes(model: ModelConfig) -> int:
    """Bytes of the activations of all experts that process a token."""
    width = model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
    return mlp.activation_bytes(model, width)
