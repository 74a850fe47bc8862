"""One layer: norms, attention and feed-forward part. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import attention, feed_forward, norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def parameters(model: ModelConfig, layer: int, *, active: bool) -> int:
    """Parameters of layer number ``layer``; ``active``: only those that one token uses."""
    units = feed_forward.parameters(model, layer, active=active)
    return norm.layer_parameters(model) + attention.parameters(model) + units


def passed_bytes(model: ModelConfig, layer: int) -> int:
    """Bytes of the memory-bound ops of layer number ``layer``."""
    return norm.layer_bytes(model) + feed_forward.activation_bytes(model, layer)
