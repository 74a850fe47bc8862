"""A config as YAML text in which every line names the flag that it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from trainer.config.train_config import TrainConfig

_NUMBER = re.compile(r"[-+]?\d+(\.\d+([eE][-+]\d+)?)?")
_WIDTH = 1_000_000


def render_config(
    source: str,
    sections: Mapping[str, Mapping[str, Any]],
    origins: Mapping[str, str],
    config: TrainConfig,
    notes: Sequence[tuple[str, Iterable[tuple[int, str, str]]]],
) -> str:
    """The text of the config file.

    Args:
        source: comment of the first line.
        sections: section -> key -> value as the script has it.
        origins: dotted key -> flag and line.
        config: the checked config, which has every value in its own type.
        notes: title and lines of the comments at the end.
    """
    lines = [f"# {_one_line(source)}"]
    checked = config.model_dump(mode="json")
    for section in TrainConfig.model_fields:
        values = sections.get(section)
        if not values:
            continue
        lines += ["", f"{section}:"]
        for key, given in values.items():
            origin = origins.get(f"{section}.{key}", "")
            value = checked[section][key]
            if isinstance(value, dict) and value and section == "job":
                lines.append(f"  {key}:")
                lines += [
                    _line(f"    {_scalar(name, name)}", _scalar(text, text), origins.get(f"{section}.{key}.{name}", ""))
                    for name, text in value.items()
                ]
            else:
                lines.append(_line(f"  {key}", _scalar(value, given), origin))
    for title, entries in notes:
        shown = [
            f"#   {_one_line(words)}{f' (line {line})' if line else ''}: {_one_line(reason)}"
            for line, words, reason in entries
        ]
        lines += ["", f"# {title}", *shown] if shown else []
    return "\n".join(lines) + "\n"


def _line(key: str, value: str, origin: str) -> str:
    return f"{key}: {value}" + (f"  # {_one_line(origin)}" if origin else "")


def _scalar(value: Any, given: Any) -> str:
    """YAML of a value on one line; a number as the script writes it, where YAML reads the same."""
    is_number = isinstance(value, (int, float)) and isinstance(given, str) and _NUMBER.fullmatch(given) is not None
    if is_number and yaml.safe_load(given) == value:
        return str(given)
    return (
        yaml.safe_dump(value, default_flow_style=True, width=_WIDTH, allow_unicode=True).removesuffix("...\n").strip()
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
