"""One layer: norms, attention and feed-forward part. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import attention, experts, mlp, norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def parameters(model: ModelConfig, layer: int, *, active: bool) -> int:
    """Parameters of layer number ``layer``; ``active``: only those that one token uses."""
    feed_forward = experts.parameters(model, active=active) if model.is_moe_layer(layer) else mlp.parameters(model)
    return norm.layer_parameters(model) + attention.parameters(model) + feed_forward


def passed_bytes(model: ModelConfig, layer: int) -> int:
    """Bytes of the memory-bound ops of layer number ``layer``."""
    activated = experts.activation_bytes(model) if model.is_moe_layer(layer) else mlp.activation_bytes(model)
    return norm.layer_bytes(model) + activated
