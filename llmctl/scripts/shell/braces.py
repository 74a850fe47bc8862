"""Brace expansion: ``{a,b}`` and ``{1..3}``. Manual: GNU Bash, section 3.5.1."""

from __future__ import annotations

import re

from llmctl.scripts.shell.syntax import Literal, Part, Word, joined

_MOST = 10_000
_SEQUENCE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?\}")


def expand_braces(word: Word) -> list[Word]:
    """The words that a word stands for; quotes and variables are kept as they are."""
    if not any(isinstance(part, Literal) and part.is_open and "{" in part.text for part in word):
        return [word]
    letters: list[Part] = []
    for part in word:
        if isinstance(part, Literal) and part.is_open:
            letters += [Literal(letter, part.line) for letter in part.text]
        else:
            letters.append(part)
    return [joined(one) for one in _expand(letters)]


def _expand(parts: list[Part]) -> list[list[Part]]:
    for start, part in enumerate(parts):
        if _sign(part) != "{":
            continue
        found = _alternatives(parts, start)
        if found is None:
            continue
        end, choices = found
        return [[*parts[:start], *choice, *rest] for choice in choices for rest in _expand(parts[end + 1 :])]
    return [parts]


def _alternatives(parts: list[Part], start: int) -> tuple[int, list[list[Part]]] | None:
    """Place of the closing brace with the alternatives; None if the braces are text."""
    depth, commas = 0, [start]
    for place in range(start, len(parts)):
        sign = _sign(parts[place])
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 1:
            commas.append(place)
        if not depth:
            break
    else:
        return None
    if len(commas) > 1:
        ends = [*commas[1:], place]
        pieces = [parts[one + 1 : end] for one, end in zip(commas, ends, strict=True)]
        return place, [expanded for piece in pieces for expanded in _expand(piece)]
    text = "".join(_sign(part) or "\0" for part in parts[start : place + 1])
    sequence = _SEQUENCE.fullmatch(text)
    words = _sequence(sequence) if sequence is not None else None
    return None if words is None else (place, [[Literal(word, parts[start].line)] for word in words])


def _sequence(found: re.Match[str]) -> list[str] | None:
    first, last, step = found[1], found[2], abs(int(found[3] or 1)) or 1
    is_number = [re.fullmatch(r"-?\d+", end) is not None for end in (first, last)]
    if is_number[0] != is_number[1]:
        return None
    begin, end = (int(first), int(last)) if is_number[0] else (ord(first), ord(last))
    numbers = range(begin, end + (1 if begin <= end else -1), step if begin <= end else -step)
    if len(numbers) > _MOST:
        return None
    width = max(len(first), len(last)) if any(re.match(r"-?0\d", one) for one in (first, last)) else 0
    return [f"{number:0{width}d}" if is_number[0] else chr(number) for number in numbers]


def _sign(part: Part) -> str:
    return part.text if isinstance(part, Literal) and part.is_open else ""
