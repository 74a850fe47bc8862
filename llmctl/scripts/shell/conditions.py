"""``test``, ``[ ]`` and ``[[ ]]``. Manual: GNU Bash, section 6.4."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.expansion import matches
from llmctl.scripts.shell.values import Value, is_of_a_pattern, text_of

_FILE_TESTS = frozenset(
    ("-a", "-b", "-c", "-d", "-e", "-f", "-g", "-h", "-k", "-L", "-p", "-r", "-s", "-S", "-u", "-w", "-x")
)
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_CLASSES = {
    **{"digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s"},
    **{"xdigit": "0-9A-Fa-f", "blank": r" \t", "punct": r"!-/:-@\[-`{-~"},
}
_TEXTS = ("=", "==", "!=", "=~", "<", ">")


@dataclass(frozen=True)
class Truth:
    """Result of a command.

    Attributes:
        value: None if unknown.
        is_sure: False for an assumption: a file that a test asks for is not there, as before a first run.
        cause: variable with which a user can decide an unknown result; empty without one.
    """

    value: bool | None
    is_sure: bool = True
    cause: str = ""

    def __invert__(self) -> Truth:
        return Truth(None if self.value is None else not self.value, self.is_sure, self.cause)

    def __and__(self, other: Truth) -> Truth:
        for one in (self, other):
            if one.value is False and one.is_sure:
                return one
        if self.value is None or other.value is None:
            return Truth(None, is_sure=False, cause=self.cause or other.cause)
        return Truth(self.value and other.value, self.is_sure and other.is_sure)

    def __or__(self, other: Truth) -> Truth:
        return ~(~self & ~other)


YES, NO = Truth(value=True), Truth(value=False)
UNKNOWN = Truth(value=None, is_sure=False)
NO_FILE = Truth(value=False, is_sure=False)


def decide(
    words: Sequence[Value],
    line: int,
    number: Callable[[str, int], int | None],
    keep_match: Callable[[Sequence[str], int], None] = lambda _found, _line: None,
) -> Truth:
    """The result of a test.

    Args:
        words: between the brackets, expanded.
        line: for messages.
        number: value of an operand of -eq and the like; None if unknown.
        keep_match: receives the parts that a ``=~`` matches.
    """
    reader = _Test(words, line, number, keep_match)
    result = reader.either() if words else NO
    if reader.left and [text_of(word) for word in words[:1]] in (["-n"], ["-z"]):
        return NO  # An unquoted variable of several words: bash tells of too many arguments, and the test fails.
    if reader.left:
        raise ScriptError(line, f"the test [ {' '.join(text_of(word) for word in words)} ] cannot be read")
    return result


class _Test:
    def __init__(
        self,
        words: Sequence[Value],
        line: int,
        number: Callable[[str, int], int | None],
        keep_match: Callable[[Sequence[str], int], None],
    ) -> None:
        self.left = list(words)
        self._line, self._number, self._keep_match = line, number, keep_match

    def either(self) -> Truth:
        result = self._both()
        while self._next() in ("||", "-o"):
            self.left.pop(0)
            result = result | self._both()
        return result

    def _both(self) -> Truth:
        result = self._one()
        while self._next() in ("&&", "-a"):
            self.left.pop(0)
            result = result & self._one()
        return result

    def _next(self, place: int = 0) -> str:
        return text_of(self.left[place]) if place < len(self.left) else ""

    def _one(self) -> Truth:
        if not self.left:
            raise ScriptError(self._line, "the test ends before its condition")
        first, operator = self._next(), self._next(1)
        if len(self.left) >= 3 and (operator in _NUMBERS or operator in _TEXTS or operator in ("-ot", "-nt", "-ef")):
            left, _, right = (self.left.pop(0) for _ in range(3))
            return self._compare(left, operator, right)
        if first == "!" and len(self.left) > 1:
            self.left.pop(0)
            return ~self._one()
        if first == "(":
            self.left.pop(0)
            result = self.either()
            if self._next() != ")":
                raise ScriptError(self._line, "a bracket of the test never closes")
            self.left.pop(0)
            return result
        if len(self.left) > 1 and (first in _FILE_TESTS or first in ("-n", "-z", "-v", "-t", "-o")):
            self.left.pop(0)
            return self._unary(first, self.left.pop(0))
        word = self.left.pop(0)
        text = _known(word)
        return unknown_by(word) if text is None else Truth(bool(text))

    def _unary(self, operator: str, operand: Value) -> Truth:
        if operator in _FILE_TESTS:
            return UNKNOWN if is_of_a_pattern(operand) else NO_FILE
        text = _known(operand)
        if text is None or operator in ("-t", "-o", "-v"):
            return unknown_by(operand)
        return Truth(bool(text) == (operator == "-n"))

    def _compare(self, left: Value, operator: str, right: Value) -> Truth:
        one, other = _known(left), _known(right)
        if one is None or other is None or operator in ("-ot", "-nt", "-ef"):
            return unknown_by((*left, *right))
        if operator in _NUMBERS:
            first, second = self._number(one, self._line), self._number(other, self._line)
            return UNKNOWN if first is None or second is None else Truth(_NUMBERS[operator](first, second))
        if operator == "=~":
            try:
                found = re.search(_in_python(other), one)
            except re.error:
                return UNKNOWN
            self._keep_match([found[0], *(part or "" for part in found.groups())] if found else [], self._line)
            return Truth(found is not None)
        if operator in ("<", ">"):
            return Truth(one < other if operator == "<" else one > other)
        return Truth((one == other or matches(one, other)) == (operator != "!="))


def unknown_by(value: Value) -> Truth:
    """An unknown result, with the only variable that a user could give for it."""
    names = {chunk.missing.name for chunk in value if chunk.missing is not None and chunk.missing.stand_in is None}
    return Truth(None, is_sure=False, cause=names.pop() if len(names) == 1 else "")


def _in_python(pattern: str) -> str:
    """An extended regular expression with Python's classes of characters."""
    return re.sub(r"\[:(\w+):\]", lambda found: _CLASSES.get(found[1], found[0]), pattern)


def _known(value: Value) -> str | None:
    """The text that a condition sees; None if unknown."""
    parts = [chunk.text if chunk.missing is None else chunk.missing.stand_in for chunk in value]
    return None if None in parts else "".join(part or "" for part in parts)
