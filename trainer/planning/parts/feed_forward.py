"""The feed-forward part of a layer: dense, or a mixture of experts with router and shared expert. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

GATED_BYTES, PLAIN_BYTES = 8 * 4, 5 * 4
"""Bytes per feed-forward unit: the activation reads inputs and writes outputs, in forward and in backward."""


def parameters(model: ModelConfig, layer: int, *, active: bool) -> int:
    """Parameters in layer number ``layer``; ``active``: only those that one token uses."""
    return expert_parameters(model, active=active) if model.is_moe_layer(layer) else dense_parameters(model)


def activation_bytes(model: ModelConfig, layer: int) -> int:
    """Bytes of the activations of layer number ``layer``, of all experts that process a token."""
    if not model.is_moe_layer(layer):
        return _activation_bytes(model, model.ffn_size)
    width = model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
    return _activation_bytes(model, width)


def dense_parameters(model: ModelConfig, width: int | None = None) -> int:
    """Parameters of a feed-forward network with ``width`` units; None: those of the dense layers."""
    width = width or model.ffn_size
    inner = 2 * width if model.is_gated else width
    weights = model.hidden_size * (inner + width)
    return weights + (0 if model.disable_bias_linear else inner + model.hidden_size)


def expert_parameters(model: ModelConfig, *, active: bool) -> int:
    """Parameters of one layer of experts: of all experts, or of those that one token passes through.

    The bias that only chooses experts is not a parameter: no gradient reaches it.
    """
    count = model.num_experts or 0
    router = (model.hidden_size + model.moe_router_bias) * count
    shared = model.moe_shared_expert_intermediate_size
    each = dense_parameters(model, model.expert_ffn_size)
    experts = (model.moe_router_topk if active else count) * each
    gate = model.hidden_size * model.moe_shared_expert_gate
    return router + experts + (dense_parameters(model, shared) + gate if shared else 0)


def _activation_bytes(model: ModelConfig, width: int) -> int:
    return (GATED_BYTES if model.is_gated else PLAIN_BYTES) * width
