"""Building of a checked TrainConfig from YAML or plain values. Torch-free."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer.config.counted_flags import COUNTED
from trainer.config.errors import ConfigError, joined
from trainer.config.joint.flags import JOINT_FLAGS
from trainer.config.megatron_flags import ALIASES, REFUSED, SQUARE_ROOTS, WITHOUT_EFFECT
from trainer.config.other_names import OTHER_NAMES
from trainer.config.sections.section import Section
from trainer.config.train_config import TrainConfig
from trainer.config.yaml_file import read_yaml
from trainer.planning.checks import check_relations

_MOST_NAMES = 8
"""Of the names in a message."""


def build_config(values: Mapping[str, Any]) -> TrainConfig:
    """Build a TrainConfig from nested plain values, such as parsed YAML.

    Raises:
        ConfigError: all problems, by key; for an unknown key it suggests the nearest valid one.
    """
    try:
        config = TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise joined(_problems(error, values)) from None
    check_relations(config)
    return config


def names_start(values: Mapping[str, Any]) -> bool:
    """True if a config takes its model from files: see trainer.planning.start_model."""
    model, checkpoint = values.get("model"), values.get("checkpoint")
    shape = isinstance(model, Mapping) and model.get("from")
    return bool(shape or (isinstance(checkpoint, Mapping) and checkpoint.get("load")))


def _problems(error: ValidationError, values: Mapping[str, Any]) -> list[ConfigError]:
    """All of them, missing keys last: one may be misspelt, or its section is taken from a model with a wrong value."""
    order = {"extra_forbidden": 0, "missing": 2}
    details = sorted(error.errors(include_url=False), key=lambda detail: order.get(detail["type"], 1))
    found: list[ConfigError] = []
    for detail in details:
        key = ".".join(_key_parts(detail["loc"], values))
        is_named = any(f" did you mean {key}?" in other.problem for other in found)
        if not (detail["type"] == "missing" and is_named):
            found.append(_problem(key, detail))
    return found


def _key_parts(place: Sequence[int | str], values: Any) -> Iterator[str]:
    """Parts of the key at a place in the values, without the names that pydantic gives the types of a union."""
    for depth, part in enumerate(place):
        has_part = isinstance(values, Mapping) and part in values
        if depth > 1 and not has_part:
            return
        yield str(part)
        values = values[part] if has_part else None


def _problem(key: str, detail: ErrorDetails) -> ConfigError:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    if detail["type"] == "extra_forbidden":
        return ConfigError(key, unknown_key_problem(key))
    if detail["type"] == "missing":
        return ConfigError(key, "is required and has no default; set it")
    message = str(cause) if cause else detail["msg"][:1].lower() + detail["msg"][1:]
    return ConfigError(key, f"{detail['input']!r} is not valid: {message}")


def megatron_flag_problem(name: str, keys: Sequence[str]) -> str | None:
    """The meaning of a Megatron-LM flag that is given as a key; None for another word, or the name of a key."""
    flag = name.replace("_", "-")
    if name in OTHER_NAMES or any(key.endswith(f".{flag.replace('-', '_')}") for key in keys):
        return None
    if flag in ALIASES:
        alias = ALIASES[flag]
        value = "" if alias.value is None else f": {json.dumps(alias.value)}"
        return f"is Megatron-LM's --{flag}; use {alias.key}{value if alias.entry is None else f' with {alias.entry}'}"
    if flag in COUNTED:
        return f"is Megatron-LM's --{flag}; use {COUNTED[flag]}, in iterations"
    if flag in SQUARE_ROOTS:
        key, of = SQUARE_ROOTS[flag]
        return f"is Megatron-LM's --{flag}; use {key} with the square root of {of}"
    if flag in JOINT_FLAGS:
        return f"is Megatron-LM's --{flag}; use {JOINT_FLAGS[flag][0]}"
    if flag in WITHOUT_EFFECT:
        return f"is Megatron-LM's --{flag}, which has no key here: {WITHOUT_EFFECT[flag].reason}; leave it out"
    return f"is Megatron-LM's --{flag}, which {_as_clause(REFUSED[flag])}" if flag in REFUSED else None


def _as_clause(sentence: str) -> str:
    """The refusal of a flag after "which": sentences without a verb of their own begin with a noun."""
    return sentence if sentence.startswith(("is ", "has ", "needs ", "belongs ")) else f"is refused: {sentence}"


def known_keys() -> tuple[str, ...]:
    """Every dotted key of the training config."""
    return tuple(
        f"{section}.{key}"
        for section, field in TrainConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for key in field.annotation.model_fields
    )


def unknown_key_problem(key: str) -> str:
    """Message for an unknown dotted key: the meaning of a Megatron-LM flag, or the nearest valid key."""
    section, _, name = key.rpartition(".")
    sections, keys = tuple(TrainConfig.model_fields), known_keys()
    flag = megatron_flag_problem(name, keys)
    if flag is not None:
        return flag
    near = difflib.get_close_matches(name, sections, n=1, cutoff=0.6) if not section else []
    near = near or [known for known in keys if known.endswith(f".{name}")]
    other = OTHER_NAMES.get(name.lower().replace("-", "_"))
    near = near or ([other] if other else [])
    if section:
        near = near or _near(name, [known for known in keys if known.startswith(f"{section}.")]) or _near(name, keys)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    if section not in sections:
        return f"unknown key; the sections are {', '.join(sections)}"
    own = [known.rpartition(".")[2] for known in keys if known.startswith(f"{section}.")]
    like = own if len(own) <= _MOST_NAMES else difflib.get_close_matches(name, own, n=_MOST_NAMES, cutoff=0)
    shown = f"{section} has {', '.join(like)}{'' if like == own else f' and {len(own) - len(like)} more'}"
    return f"unknown key; {shown}; `llmctl explain {section}.KEY` explains one"


def _near(name: str, keys: Sequence[str]) -> list[str]:
    """The key whose name is spelled almost like ``name``, if any."""
    names = {key.rpartition(".")[2]: key for key in keys}
    return [names[found] for found in difflib.get_close_matches(name, names, n=1, cutoff=0.75)]


def load_config(path: Path) -> TrainConfig:
    """Load a TrainConfig from a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or has an invalid value.
    """
    return build_config(read_yaml(path))
