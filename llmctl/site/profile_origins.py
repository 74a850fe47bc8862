"""Origins of a profile's values, and the profile as text annotated with them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmctl.paths import UserFolders, profile_files
from llmctl.site.profile import read_layer


def origins(folders: UserFolders, name: str) -> dict[str, Path]:
    """Dotted key -> the file of its value; absent keys have llmctl's default."""
    found: dict[str, Path] = {}
    for path in profile_files(folders, name):
        layer = read_layer(path)
        for key in _leaves(layer):
            # A mapping that replaces a scalar, or the reverse, removes all keys below and above it.
            found = {known: file for known, file in found.items() if not _is_related(known, key)}
            found[key] = path
    return found


def annotated_lines(
    values: Mapping[str, Any], marks: Mapping[str, str], prefix: str = "", indent: str = ""
) -> list[str]:
    """YAML of ``values``, one line per value, each with its mark as a comment.

    Args:
        values: the profile as plain data.
        marks: dotted key -> origin of its value.
        prefix: dotted key of the mapping that holds ``values``, with a trailing dot.
        indent: spaces before each line.
    """
    lines = []
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        name = _yaml_scalar(key)
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:")
            lines += annotated_lines(value, marks, f"{dotted}.", f"{indent}  ")
            continue
        mark = marks.get(dotted)
        lines.append(f"{indent}{name}: {_yaml_flow(value)}" + (f"  # {mark}" if mark else ""))
    return lines


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            keys += _leaves(value, f"{prefix}{key}.")
        else:
            keys.append(f"{prefix}{key}")
    return keys


def _is_related(known: str, key: str) -> bool:
    return known == key or known.startswith(f"{key}.") or key.startswith(f"{known}.")


def _yaml_scalar(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _yaml_flow(value: Any) -> str:
    if isinstance(value, str):
        plain = _yaml_scalar(value)
        return plain if "\n" not in plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        # Inside brackets a comma separates entries, so every value except a plain word is quoted.
        return "[" + ", ".join(_in_brackets(entry) for entry in value) + "]"
    return _yaml_scalar(value)


def _in_brackets(value: Any) -> str:
    plain = _yaml_flow(value)
    is_text = isinstance(value, str) and not plain.startswith(("'", '"'))
    return json.dumps(value, ensure_ascii=False) if is_text and set(plain) & set(",[]{}") else plain
