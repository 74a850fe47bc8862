"""Comparison of the words that a program received with the values that llmctl read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import join, normpath

from benchmarks.published_corpus.sandbox import HOME
from llmctl.scripts.shell.values import Chunk, Value, missing_of, text_of


@dataclass(frozen=True)
class Difference:
    """First place at which words differ.

    Attributes:
        place: number of the word.
        read: by llmctl; empty behind the last word.
        received: by the program; empty behind the last word.
    """

    place: int
    read: str
    received: str


@dataclass(frozen=True)
class Sameness:
    """Result of a comparison.

    Attributes:
        difference: None if all words are the same, apart from parts that only the job knows.
        unknown: number of words with such a part.
        swallowed: flags in the place of a part that only the job knows.
    """

    difference: Difference | None
    unknown: int = 0
    swallowed: tuple[str, ...] = ()


def compare(read: Sequence[Value], received: Sequence[str], start: str, folder: str) -> Sameness:
    """Compare word by word.

    Args:
        read: values of llmctl.
        received: words of the program.
        start: folder in which the script starts, which is ``.`` for llmctl.
        folder: in which the program starts.
    """
    patterns = [_pattern(value, start) for value in read]
    # How far a beginning of the values and a beginning of the words go together.
    reached: dict[tuple[int, int], tuple[int, int] | None] = {(0, 0): None}
    todo, farthest = [(0, 0)], (0, 0)
    while todo:
        value, word = todo.pop()
        farthest = max(farthest, (value, word))
        if (value, word) == (len(read), len(received)):
            return Sameness(None, sum(missing_of(one) is not None for one in read), _swallowed(reached, read, received))
        following = []
        if value < len(read) and _is_open(read[value]):
            following += [(value + 1, word)] + ([(value, word + 1)] if word < len(received) else [])
        elif value < len(read) and word < len(received):
            is_same = patterns[value].fullmatch(received[word]) or _is_same_path(
                read[value], received[word], start, folder
            )
            following += [(value + 1, word + 1)] if is_same else []
        for one in following:
            if one not in reached:
                reached[one] = (value, word)
                todo.append(one)
    value, word = farthest
    shown = text_of(read[value]) if value < len(read) else ""
    return Sameness(Difference(word, shown, received[word] if word < len(received) else ""))


def _swallowed(
    reached: dict[tuple[int, int], tuple[int, int] | None], read: Sequence[Value], received: Sequence[str]
) -> tuple[str, ...]:
    found = []
    after = (len(read), len(received))
    while (place := reached[after]) is not None:
        if place[0] == after[0] and received[place[1]].startswith("--"):
            found.append(received[place[1]])
        after = place
    return tuple(reversed(found))


def _is_open(value: Value) -> bool:
    """True for an unknown part without quotes, which can be any number of words."""
    return missing_of(value) is not None and not text_of(value) and any(chunk.divides for chunk in value)


def _pattern(value: Value, start: str) -> re.Pattern[str]:
    return re.compile("".join(_chunk_pattern(chunk, start) for chunk in value), re.DOTALL)


def _chunk_pattern(chunk: Chunk, start: str) -> str:
    if chunk.missing is not None:
        return ".*"
    if chunk.is_here and chunk.text == ".":
        return f"(?:\\.|{re.escape(start)})"
    before, sign, after = chunk.text.partition("~")
    return f"{re.escape(before)}(?:~|{re.escape(HOME)}){re.escape(after)}" if sign else re.escape(before)


def _is_same_path(value: Value, word: str, start: str, folder: str) -> bool:
    """True for two spellings of a path that the script binds to the folder in which it starts."""
    if missing_of(value) is not None or not any(chunk.is_here for chunk in value):
        return False
    return normpath(join(start, text_of(value))) == normpath(join(folder, word))
