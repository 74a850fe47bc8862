"""Rotary positions in config.json: the form of transformers 5 and the older one. Torch-free.

transformers 5 has ``rope_parameters {rope_type, rope_theta, ...}``, per kind of layer in Gemma 3; transformers 4 has
``rope_theta``, ``rope_scaling {rope_type or type, ...}`` and, in Gemma 3, ``rope_local_base_freq``. An export has both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.errors import FamilyError
from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_APART = ("rope_theta", "partial_rotary_factor", "rope_type", "type")


def read_rope(
    hub: HubConfig, base: float = 10000.0, local_base: float | None = None, percent: float = 1.0
) -> dict[str, Any]:
    """Our keys for the rotary positions of a config.json.

    Args:
        hub: the file.
        base: of a file that names none.
        local_base: of layers with a window in a file that names none; None if the family has one base.
        percent: share of rotated channels in a file that names none.

    Raises:
        FamilyError: the layers with a window have scaled angles.
    """
    old_scaling, old_base = hub.take("rope_scaling"), hub.take("rope_theta", hub.take("rotary_emb_base", base))
    old_percent = hub.take("partial_rotary_factor", hub.take("rotary_pct", percent))
    found = hub.take("rope_parameters")
    if local_base is not None:
        local_base = hub.take("rope_local_base_freq", local_base)
    if found and "full_attention" in found:
        local = found["sliding_attention"]
        if local.get("rope_type", "default") != "default":
            raise FamilyError(
                f"{hub.where}: rope_parameters scales layers with a sliding window, which is not supported"
            )
        local_base, found = local["rope_theta"], found["full_attention"]
    if not found:
        found = {"rope_theta": old_base, "partial_rotary_factor": old_percent, **(old_scaling or {})}
    rope_type = found.get("rope_type", found.get("type", "default"))
    keys: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": found.get("rope_theta", old_base),
        "rotary_percent": found.get("partial_rotary_factor", old_percent),
    }
    if rope_type != "default":
        rest = {key: value for key, value in found.items() if key not in _APART and value is not None}
        keys["rope_scaling"] = {"rope_type": rope_type, **rest}
    if local_base is not None:
        keys["rotary_base_local"] = local_base
    return keys


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json in both forms."""
    scaling = dict(model.rope_scaling) if model.rope_scaling else None
    current: dict[str, Any] = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rotary_base}
    old: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_scaling": scaling}
    if model.rotary_percent != 1.0:
        current["partial_rotary_factor"] = old["partial_rotary_factor"] = model.rotary_percent
    if model.rotary_base_local is None:
        return {**old, "rope_parameters": current}
    local = {"rope_type": "default", "rope_theta": model.rotary_base_local}
    nested = {"full_attention": current, "sliding_attention": local}
    return {**old, "rope_local_base_freq": model.rotary_base_local, "rope_parameters": nested}
