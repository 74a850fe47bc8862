"""``read`` and ``mapfile`` of text that stands in the script itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmctl.scripts.shell.expansion import Expansion
from llmctl.scripts.shell.state import Variable
from llmctl.scripts.shell.syntax import Simple
from llmctl.scripts.shell.values import Value, missing_of, plain, text_of

_VALUED = {"read": "dinNptu", "mapfile": "dnOsucC", "readarray": "dnOsucC"}


def input_of(command: Simple, expansion: Expansion) -> Value | None:
    """The here-document or here-string of a command; None if the input is another."""
    for redirect in reversed(command.redirects):
        if redirect.operator == "<<<":
            return (*expansion.text(redirect.target), *plain("\n", redirect.line))
    return expansion.text(command.documents[-1].content[0]) if command.documents else None


def variables_read(command: Simple, words: Sequence[Value], expansion: Expansion) -> dict[str, Variable] | None:
    """The variables that ``read`` or ``mapfile`` sets; None if the input or an option is unknown."""
    given = input_of(command, expansion)
    if given is None or missing_of(given) is not None:
        return None
    text, line = text_of(given), command.line
    name, options, names = _divided(words)
    if name != "read":
        lines = text.removesuffix("\n").split("\n") if text else []
        is_kept = "t" not in options
        items = [plain(f"{one}\n" if is_kept else one, line) for one in lines]
        return {(names or ["MAPFILE"])[0]: items}
    if "d" in options:
        end = options["d"][:1]
        text = text.partition(end)[0] if end else text
    else:
        text = text.partition("\n")[0]
    separators = next((expansion.text(one.value) for one in command.assignments if one.name == "IFS"), None)
    signs = " \t\n" if separators is None else text_of(separators)
    if "a" in options:
        return {options["a"]: [plain(one, line) for one in _fields(text, signs, 0)]}
    names = names or ["REPLY"]
    fields = _fields(text, signs, len(names))
    return {one: plain(field, line) for one, field in zip(names, [*fields, *[""] * len(names)], strict=False)}


def _divided(words: Sequence[Value]) -> tuple[str, dict[str, str], list[str]]:
    """Name of the command, its options with their values, and the names of variables."""
    name, *rest = (text_of(word) for word in words)
    valued = _VALUED.get(name, "") + ("a" if name == "read" else "")
    options: dict[str, str] = {}
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        letters = rest.pop(0)[1:]
        for place, letter in enumerate(letters):
            options[letter] = ""
            if letter in valued:
                options[letter] = letters[place + 1 :] or (rest.pop(0) if rest else "")
                break
    return name, options, rest


def _fields(text: str, signs: str, most: int) -> list[str]:
    """The fields of a line; the last of ``most`` fields keeps the rest of the line."""
    blank = "".join(sign for sign in signs if sign in " \t\n")
    other = "".join(sign for sign in signs if sign not in " \t\n")
    if not signs:
        return [text]
    text = text.strip(blank) if blank else text
    if not text:
        return []
    space = f"[{re.escape(blank)}]" if blank else ""
    pattern = "|".join(
        [
            *([f"{space}*[{re.escape(other)}]{space}*" if space else f"[{re.escape(other)}]"] if other else []),
            *([f"{space}+"] if space else []),
        ]
    )
    fields = re.split(pattern, text, maxsplit=max(most - 1, 0)) if most != 1 else [text]
    if not most and other and fields and not fields[-1]:
        fields.pop()
    return fields
