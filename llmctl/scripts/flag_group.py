"""The words of a training line, divided into flags with their values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.assigning import OPEN_PLACE
from llmctl.scripts.shell.values import LEFT_OPEN, Missing, Value, missing_of, text_of

UNKNOWN_TEXT = "1"
"""Stands for a value of which no part is known."""


@dataclass(frozen=True)
class FlagGroup:
    """A flag with its values.

    Attributes:
        name: without dashes.
        words: the flag and its values, as text.
        line: of the flag in the script.
        missing: the first part that is unknown.
        further: the other unknown parts.
    """

    name: str
    words: tuple[str, ...]
    line: int
    missing: Missing | None
    further: tuple[Missing, ...] = ()

    @property
    def origin(self) -> str:
        """As in a comment."""
        return f"--{self.name}, line {self.line}" if self.line else f"--{self.name}"


def group_flags(arguments: Sequence[Value], line: int) -> list[FlagGroup]:
    """Divide the words of a training line into flags with their values.

    Raises:
        ScriptError: the first word is not a flag.
    """
    groups: list[list[Value]] = []
    for word in arguments:
        text = text_of(word)
        if text.startswith("--") and len(text) > 2:
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        elif text or missing_of(word) is not None:
            missing = missing_of(word)
            if missing is not None:
                values = [UNKNOWN_TEXT] if missing.name else []
                raise ScriptError.asking(missing.line, missing.problem, missing.name, values)
            raise ScriptError(word[0].line if word else line, f"{text!r} is not a flag of the training program")
    return [_group(words) for words in groups]


def _group(words: Sequence[Value]) -> FlagGroup:
    texts = [text_of(word) if missing_of(word) is None else text_of(word) or UNKNOWN_TEXT for word in words]
    missing = [chunk.missing for word in words for chunk in word if chunk.missing is not None]
    name, line = texts[0][2:].partition("=")[0], words[0][0].line
    return FlagGroup(name, tuple(texts), line, missing[0] if missing else None, tuple(missing[1:]))


def name_open_values(
    groups: Sequence[FlagGroup], given: Mapping[str, str], variables: Collection[str]
) -> list[FlagGroup]:
    """The flags, in which a value that is open and that no variable holds has the flag's own name, or the user's value.

    Args:
        groups: the flags.
        given: by --arg; a value of several words gives several, as a variable without quotes does.
        variables: names of the script's variables, which no flag takes.
    """
    return [group if group.name in variables else _named(group, given) for group in groups]


def _named(group: FlagGroup, given: Mapping[str, str]) -> FlagGroup:
    nameless = [missing for missing in (group.missing, *group.further) if missing is not None and not missing.name]
    written = OPEN_PLACE.search(_values(group))
    if not nameless and written is None:
        if group.name in given and "-" in group.name:
            raise ScriptError(group.line, f"--arg {group.name}: the script has a value for this flag; leave it out")
        return group
    if group.name in given:
        return replace(group, words=(f"--{group.name}", *given[group.name].split()), missing=None, further=())
    first = nameless[0] if nameless else Missing(group.line, written[0] if written else "", LEFT_OPEN)
    named = [one for one in (group.missing, *group.further) if one is not None and one.name]
    words = (
        group.words if written is None else (f"--{group.name}", *OPEN_PLACE.sub(UNKNOWN_TEXT, _values(group)).split())
    )
    return replace(group, words=words, missing=replace(first, name=group.name), further=tuple(named))


def _values(group: FlagGroup) -> str:
    _, equals, value = group.words[0].partition("=")
    return " ".join([value, *group.words[1:]] if equals else group.words[1:])


def is_open_flag(text: str, name: str) -> bool:
    """True if a script may leave a value of the flag ``name`` open."""
    return re.search(rf"--{re.escape(name)}[\s=](?:(?!\s--).)*?(<[A-Za-z]|\$\(|`)", text, re.DOTALL) is not None
