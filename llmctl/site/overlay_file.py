"""Edit values in the text of a user's overlay and keep its comments. Pure: text in, text out."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.errors import ProfileError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

Changes = Mapping[tuple[str, ...], Any]
"""Path of keys -> value: plain text, a list of texts, or None to unset a value of the bundled profile."""


def changed_text(text: str, changes: Changes) -> str | None:
    """Change or add values in ``text``, a YAML mapping; None if the file needs more than simple edits.

    All other text stays the same, byte for byte. The result is parsed and compared with the expected values, so that an
    unusual file (anchors, several documents, one flow mapping) gives None and never a wrong result.
    """
    import yaml

    loader = yaml.SafeLoader
    try:
        wanted = yaml.load(text, loader) or {}
        if not isinstance(wanted, dict):
            return None
        for path, value in changes.items():
            text = _with_value(text, path, value)
            _put(wanted, path, value)
        return text if yaml.load(text, loader) == wanted else None
    except (yaml.YAMLError, _NotPossible):
        return None


def as_yaml(changes: Changes) -> str:
    """The changes as a separate YAML file, for editing by hand."""
    import yaml

    values: dict[str, Any] = {}
    for path, value in changes.items():
        _put(values, path, value)
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False, allow_unicode=True)


def edited(file: str, text: str, changes: Changes) -> str:
    """Like ``changed_text``, with an error instead of None.

    Raises:
        ProfileError: the text cannot be edited; shows the changes to make by hand.
    """
    result = changed_text(text, changes)
    if result is None:
        raise ProfileError(
            f"{file}: llmctl cannot edit this file automatically; nothing was written. "
            f"Add these values by hand:\n{as_yaml(changes).rstrip()}"
        )
    return result


class _NotPossible(Exception):
    """The text has a structure that allows no simple edit."""


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        inner = values.get(key)
        if not isinstance(inner, dict):
            inner = values[key] = {}
        values = inner
    values[path[-1]] = value


def _with_value(text: str, path: tuple[str, ...], value: Any) -> str:
    import yaml

    root: Node | None = yaml.compose(text, yaml.SafeLoader)
    if root is None:
        return _appended(text, path, value)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise _NotPossible
    return _in_mapping(text, root, path, value)


def _appended(text: str, path: tuple[str, ...], value: Any) -> str:
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{end}{_line(path, value, 0)}"


def _in_mapping(text: str, mapping: "MappingNode", path: tuple[str, ...], value: Any) -> str:
    """Set the value at ``path`` below a block mapping; returns the new text."""
    import yaml

    key, *rest = path
    found = next(((name, node) for name, node in mapping.value if name.value == key), None)
    if found is None:
        return _added(text, mapping, path, value)
    name, node = found
    if not rest:
        return _replaced(text, name, node, _literal(value))
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return _in_mapping(text, node, tuple(rest), value)
    below = yaml.SafeLoader("").construct_object(node, deep=True)
    values = below if isinstance(below, dict) else {}
    _put(values, tuple(rest), value)
    return _replaced(text, name, node, _literal(values))


def _added(text: str, mapping: "MappingNode", path: tuple[str, ...], value: Any) -> str:
    # After the last value, before comments that follow: those belong to the next key, or to no key.
    column = mapping.value[0][0].start_mark.column
    last = mapping.value[-1][1]
    end = len(text[: last.end_mark.index].rstrip())
    newline = text.find("\n", end)
    if newline < 0:
        return f"{text}\n{_line(path, value, column)}"
    return f"{text[: newline + 1]}{_line(path, value, column)}{text[newline + 1 :]}"


def _replaced(text: str, name: "Node", node: "Node", literal: str) -> str:
    start, end = name.end_mark.index, node.end_mark.index
    old = text[start:end]
    kept = old.rstrip()
    if "#" in kept and "\n" in kept:
        raise _NotPossible  # a comment inside the value would be lost
    return f"{text[:start]}: {literal}{old[len(kept) :]}{text[end:]}"


def _line(path: tuple[str, ...], value: Any, indent: int) -> str:
    for key in reversed(path[1:]):
        value = {key: value}
    return f"{' ' * indent}{path[0]}: {_literal(value)}\n"


def _literal(value: Any) -> str:
    # JSON is YAML, and reads the same for any text.
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_literal(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
