"""Rotary positions in config.json: the form of transformers 5 and the older one. Torch-free.

transformers 5 has ``rope_parameters {rope_type, rope_theta, ...}``, per kind of layer in Gemma 3; transformers 4 has
``rope_theta``, ``rope_scaling {rope_type or type, ...}`` and, in Gemma 3, ``rope_local_base_freq``. An export has both.
A file may have both, if they say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer.families.format.errors import FamilyError
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.windows import FULL, SLIDING

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_APART = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
# Types whose old length, if the file has none, is that of the model.
_OF_LENGTH = ("llama3", "yarn", "longrope")
_OLD_LENGTH, _BETA = "original_max_position_embeddings", "llama_4_scaling_beta"


def read_rope(
    hub: HubConfig,
    *,
    base_key: str = "rope_theta",
    percent_key: str | None = None,
    unscaled: Mapping[str, Any] | None = None,
    local_base_key: str | None = None,
    old_length_key: str | None = None,
    other_types: Mapping[str, str] = MappingProxyType({}),
    scales_queries: bool = False,
) -> dict[str, Any]:
    """Our keys for the rotary positions of a config.json.

    Args:
        hub: the file.
        base_key: name of the base in the old form.
        percent_key: name of the share of rotated channels in the old form; None if the family rotates all.
        unscaled: what a file without any scaling means, if not plain angles.
        local_base_key: name, in the old form, of the base of layers with a window; None if one table is of all layers.
        old_length_key: name of the old length beside the tables, which counts before theirs; None if only they have it.
        other_types: other name of a type in this family -> the type.
        scales_queries: the family reads llama_4_scaling_beta.

    Raises:
        FamilyError: both forms are there and differ, or layers with a window have scaled angles.
    """
    scaling, current = _table(hub, "rope_scaling"), _table(hub, "rope_parameters")
    keys: dict[str, Any] = {"position_embedding_type": "rope"}
    if local_base_key is not None:
        keys["rotary_base_local"], current = _split(hub, current, local_base_key)
    elif FULL in current or SLIDING in current:
        raise FamilyError(f"{hub.where}: rope_parameters differs by kind of layer, which this family does not have")
    if scaling and current and _numbers(scaling) != _numbers(current):
        raise FamilyError(f"{hub.where}: rope_scaling and rope_parameters contradict each other; remove the wrong one")
    # transformers 4 wrote rope_scaling, 5 writes rope_parameters; some files have both.
    found = scaling or current or dict(unscaled or {})
    keys["rotary_base"] = _one_value(hub, "rope_theta", {**current, **scaling}, base_key)
    keys["rotary_percent"] = _one_value(hub, "partial_rotary_factor", found, percent_key)
    rope_type = found.get("rope_type", found.get("type", "default"))
    unread = sorted(found.keys() - {*_APART})
    if rope_type == "default" and unread:
        hub.refuse(f"{'rope_scaling' if scaling else 'rope_parameters'} has {', '.join(unread)}, but no rope_type")
    if rope_type != "default":
        rope_type = other_types.get(str(rope_type), rope_type)
        keys["rope_scaling"] = numbers = {**_numbers(found), "rope_type": rope_type}
        if _BETA in numbers and not scales_queries:
            hub.refuse(f"{_BETA} is {numbers[_BETA]!r}, which transformers does not compute in this family; remove it")
        longest = hub.take("max_position_embeddings")
        if rope_type in _OF_LENGTH:
            old = longest if old_length_key is None else hub.take(old_length_key)
            if numbers.setdefault(_OLD_LENGTH, old) != old and old_length_key is not None:
                hub.refuse(
                    f"{_OLD_LENGTH} of the rotary positions is {numbers[_OLD_LENGTH]!r}, but {old_length_key} {old!r}; "
                    "remove the wrong one"
                )
        if rope_type == "longrope" and _is_size(numbers[_OLD_LENGTH]):
            numbers.setdefault("factor", max(1.0, longest / numbers[_OLD_LENGTH]))
    return keys


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _table(hub: HubConfig, key: str) -> dict[str, Any]:
    found = hub.given(key)
    if found is not None and not isinstance(found, dict):
        raise FamilyError(f"{hub.where}: {key} is {found!r}; use a table")
    return dict(found or {})


def _numbers(table: Mapping[str, Any]) -> dict[str, Any]:
    rope_type = table.get("rope_type", table.get("type", "default"))
    rest = {key: value for key, value in table.items() if key not in _APART and value is not None}
    return {"rope_type": rope_type, **rest}


def _one_value(hub: HubConfig, name: str, table: Mapping[str, Any], old: str | None) -> Any:
    """The value ``name`` of the table, or ``old`` beside it, which must be the same if both are there."""
    inner = table.get(name)
    if old is None:
        value = 1.0 if inner is None else inner
        if value != 1.0:
            hub.refuse(f"{name} is {value!r}, which transformers does not compute in this family; remove it")
        return value
    outer = hub.take(old)
    if inner is None:
        return outer
    if not isinstance(inner, (int, float)):
        raise FamilyError(f"{hub.where}: {name} is {inner!r}; use a number")
    if hub.has(old) and outer != inner:
        hub.refuse(f"{old} is {outer!r}, but {name} of the rotary positions is {inner!r}; remove the wrong one")
    return inner


def _split(hub: HubConfig, table: dict[str, Any], base_key: str) -> tuple[float, dict[str, Any]]:
    """Base of the layers with a window, and the table of the others."""
    local = hub.take(base_key)
    if not table:
        return local, table
    if not all(isinstance(table.get(kind), dict) for kind in (FULL, SLIDING)):
        raise FamilyError(f"{hub.where}: rope_parameters does not name {FULL} and {SLIDING}, each with its values")
    inner = table[SLIDING]
    if inner.get("rope_type", "default") != "default" or inner.keys() - {*_APART}:
        raise FamilyError(f"{hub.where}: rope_parameters scales layers with a sliding window, which is not supported")
    return _one_value(hub, "rope_theta", inner, base_key), table[FULL]


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
