"""Sliding windows in config.json. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.errors import FamilyError
from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(hub: HubConfig, num_layers: int, sliding: list[bool]) -> dict[str, Any]:
    """Our keys.

    Args:
        hub: the file.
        num_layers: layers of the model.
        sliding: the layers with a window in a file without layer_types.

    Raises:
        FamilyError: layer_types has another kind of layer, or not one entry for each layer.
    """
    return _windows(hub, hub.take("sliding_window", null=None), _layer_types(hub, num_layers) or sliding)


def read_late_windows(hub: HubConfig, num_layers: int) -> dict[str, Any]:
    """Our keys for Qwen's files: with use_sliding_window, layers from max_window_layers on have a window."""
    window, first = hub.take("sliding_window", null=None), hub.take("max_window_layers")
    window = window if hub.take("use_sliding_window") else None
    late = [window is not None and layer >= first for layer in range(num_layers)]
    return _windows(hub, window, _layer_types(hub, num_layers) or late)


def read_switched_windows(hub: HubConfig, num_layers: int, sliding: list[bool]) -> dict[str, Any]:
    """Our keys as by read_windows, if use_sliding_window is on; else none, and no layer of layer_types may have one."""
    if hub.take("use_sliding_window"):
        return read_windows(hub, num_layers, sliding)
    hub.given("sliding_window")
    if any(_layer_types(hub, num_layers) or []):
        hub.refuse(f"layer_types has {SLIDING}, but use_sliding_window is false; change one of the two")
    return {}


def _layer_types(hub: HubConfig, num_layers: int) -> list[bool] | None:
    """True for each layer with a window; None for a file that does not list its layers."""
    types = hub.take("layer_types", null=None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        count = len(types) if isinstance(types, list) else repr(types)
        raise FamilyError(f"{hub.where}: layer_types has {count} entries, but num_hidden_layers is {num_layers}")
    other = next((kind for kind in types if kind not in (SLIDING, FULL)), None)
    if other is not None:
        raise FamilyError(f"{hub.where}: layer_types has {other!r}, but this trainer computes only {SLIDING} or {FULL}")
    return [kind == SLIDING for kind in types]


def _windows(hub: HubConfig, window: Any, sliding: list[bool]) -> dict[str, Any]:
    if not any(sliding):
        return {}
    if window is None:
        if hub.has("layer_types"):
            raise FamilyError(f"{hub.where}: layer_types has {SLIDING}, but sliding_window names no window")
        return {}
    return {"window_size": window, "window_layers": "all" if all(sliding) else sliding}


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json, with one entry of layer_types for each layer."""
    windows = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    return {"sliding_window": model.window_size, "layer_types": [SLIDING if has else FULL for has in windows]}
