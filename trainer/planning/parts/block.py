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


def kind_of(model: ModelConfig, layer: int) -> tuple[bool, int | None]:
    """Kind of layer number ``layer``: layers of a kind have equal sizes and costs."""
    return model.is_moe_layer(layer), model.window_of(layer)


def by_kind(model: ModelConfig) -> dict[tuple[bool, int | None], list[int]]:
    """The layers of each kind."""
    found: dict[tuple[bool, int | None], list[int]] = {}
    for layer in range(model.num_layers):
        found.setdefault(kind_of(model, layer), []).append(layer)
    return found
