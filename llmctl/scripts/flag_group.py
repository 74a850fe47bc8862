"""The words of a training line, divided into flags with their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.values import Missing, Value, missing_of, text_of

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
