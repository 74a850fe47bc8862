"""Sliding windows in config.json. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(hub: HubConfig, num_layers: int, sliding: list[bool], absent: int | None = None) -> dict[str, Any]:
    """Our keys.

    Args:
        hub: the file.
        num_layers: layers of the model.
        sliding: the layers with a window in a file without layer_types.
        absent: window of a file without the key; null means no window.
    """
    window, types = hub.given("sliding_window", absent), hub.take("layer_types")
    if types is not None:
        sliding = [kind == SLIDING for kind in types[:num_layers]]
    if window is None or not any(sliding):
        return {}
    return {"window_size": window, "window_layers": "all" if all(sliding) else sliding}


def read_late_windows(hub: HubConfig, num_layers: int) -> dict[str, Any]:
    """Our keys for Qwen's files: with use_sliding_window, layers from max_window_layers on have a window."""
    uses, first = hub.take("use_sliding_window", False), hub.take("max_window_layers", num_layers)
    found = read_windows(hub, num_layers, [layer >= first for layer in range(num_layers)])
    return found if uses else {}


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json, with one entry of layer_types for each layer."""
    windows = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    return {"sliding_window": model.window_size, "layer_types": [SLIDING if has else FULL for has in windows]}
