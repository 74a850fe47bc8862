"""Building of a checked TrainConfig from YAML or plain values. Torch-free."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.errors import ConfigError
from trainer.config.sections import Section
from trainer.config.train_config import TrainConfig
from trainer.planning.checks import check_relations


def build_config(values: Mapping[str, Any]) -> TrainConfig:
    """Build a TrainConfig from nested plain values, such as parsed YAML.

    Raises:
        ConfigError: the first problem, by key; for an unknown key it suggests the nearest valid one.
    """
    try:
        config = TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise _config_error(error) from None
    check_relations(config)
    return config


def _config_error(error: ValidationError) -> ConfigError:
    # Unknown keys first: a misspelt required key is also reported as missing, and the misspelling is the cause.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    if first["type"] == "extra_forbidden":
        return ConfigError(key, unknown_key_problem(key))
    if first["type"] == "missing":
        return ConfigError(key, "is required and has no default; set it")
    message = str(cause) if cause else first["msg"][:1].lower() + first["msg"][1:]
    return ConfigError(key, f"{first['input']!r} is not valid: {message}")


def known_keys() -> tuple[str, ...]:
    """Every dotted key of the training config."""
    return tuple(
        f"{section}.{key}"
        for section, field in TrainConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for key in field.annotation.model_fields
    )


def unknown_key_problem(key: str) -> str:
    """Message for an unknown dotted key; suggests the nearest valid key."""
    section, _, name = key.rpartition(".")
    sections = tuple(TrainConfig.model_fields)
    if not section:
        near = difflib.get_close_matches(name, sections, n=1, cutoff=0.6)
        near = near or [known for known in known_keys() if known.endswith(f".{name}")]
    else:
        near = [known for known in known_keys() if known.endswith(f".{name}")]
        near = near or difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    if section not in sections:
        return f"unknown key; the sections are {', '.join(sections)}"
    return (
        f"unknown key; {section} has {', '.join(k.rpartition('.')[2] for k in known_keys() if k.startswith(section))}"
    )


def load_config(path: Path) -> TrainConfig:
    """Load a TrainConfig from a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or has an invalid value.
    """
    return build_config(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the sections of a YAML file, without checking the values.

    Raises:
        ConfigError: the file cannot be read, is not YAML, repeats a key, or is not a mapping.
    """
    import yaml

    class UniqueKeyLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Refuses a repeated key; PyYAML would silently keep the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise yaml.MarkedYAMLError(problem=f"key {twice!r} occurs twice", problem_mark=node.start_mark)
            return dict(super().construct_mapping(node, deep))

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("", f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("", f"is not a mapping of the sections {', '.join(TrainConfig.model_fields)}")
    return values
