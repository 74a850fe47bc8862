"""Expansion of words: variables, arithmetic, defaults and patterns. Manual: GNU Bash, section 3.5."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.arithmetic import ArithmeticReader
from llmctl.scripts.shell.braces import expand_braces
from llmctl.scripts.shell.state import State, Variable
from llmctl.scripts.shell.syntax import Arithmetic, Literal, Parameter, Placeholder, Substitution, Word
from llmctl.scripts.shell.values import (
    LEFT_OPEN,
    Chunk,
    Missing,
    Value,
    absent,
    lines_of,
    missing_of,
    plain,
    text_of,
    used_in,
    words_of,
)

_DEPTH, _MOST_CHUNKS, _MOST_LETTERS = 20, 10_000, 1_000_000
_ALL = ("@", "*")
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")


class Unknown(Exception):
    """An arithmetic expression with an unknown part."""

    def __init__(self, missing: Missing) -> None:
        super().__init__(missing.what)
        self.missing = missing


@dataclass
class Expansion:
    """Expansion of words in a state.

    Attributes:
        state: the variables.
        outside: values of variables that the script does not set, by name and line; None if not set anywhere.
        substitute: output of a command, as far as it can be known without running the command.
    """

    state: State
    outside: Callable[[str, int], Value | None]
    substitute: Callable[[Substitution], Value]

    def words(self, words: Sequence[Word]) -> list[Value]:
        """The words of a command, each word expanded and divided."""
        single = [one for word in words for one in expand_braces(word)]
        return [found for word in single for found in words_of(self._chunks(word))]

    def text(self, word: Word) -> Value:
        """One value, not divided: of an assignment, a pattern or a file."""
        return tuple(
            Chunk(" ", chunk.line, quoted=True) if chunk.is_break else replace(chunk, divides=False, quoted=True)
            for chunk in self._chunks(word)
        )

    def number(self, word: Word, line: int) -> int:
        """The value of an arithmetic expression.

        Raises:
            Unknown: a part is unknown.
            ScriptError: the expression is wrong.
        """
        return self._number(self.text(word), line, 0)

    def _number(self, value: Value, line: int, depth: int) -> int:
        missing = missing_of(value)
        if missing is not None and not missing.stand_in:
            raise Unknown(missing)
        if depth > _DEPTH:
            raise ScriptError(line, f"{text_of(value)} is defined by itself: variables of the expression form a circle")

        def value_of(name: str) -> int:
            found = self.variable(name.partition("[")[0], line)
            items = found if isinstance(found, list) else [found]
            index = name.partition("[")[2].rstrip("]")
            place = self._number(plain(index, line), line, depth + 1) if index else 0
            return self._number(items[place], line, depth + 1) if -len(items) <= place < len(items) else 0

        def assign(name: str, number: int) -> None:
            self.state.variables[name] = plain(str(number), line)

        text = "".join(chunk.text if chunk.missing is None else chunk.missing.stand_in or "" for chunk in value)
        return ArithmeticReader(text, line, value_of, assign).value()

    def variable(self, name: str, line: int) -> Variable:
        """The value of a variable, unknown if nothing sets it."""
        found = self._known(name, line)
        return found if found is not None else absent(unset(name, line))

    def _known(self, name: str, line: int) -> Variable | None:
        positional = self.state.positional
        if name in ("@", "*"):
            return list(positional or ())
        if name == "#":
            return plain(str(len(positional or ())), line)
        if name.isdigit() and name != "0" and positional is not None and int(name) <= len(positional):
            return positional[int(name) - 1]
        if name in self.state.variables:
            return self.state.variables[name]
        return self.outside(name, line)

    def _chunks(self, word: Word) -> list[Chunk]:
        chunks: list[Chunk] = []
        for part in word:
            if isinstance(part, Literal):
                chunks += lines_of(part.text, part.line, quoted=not part.is_open)
            elif isinstance(part, Placeholder):
                missing = Missing(part.line, part.text, LEFT_OPEN)
                chunks.append(Chunk("", part.line, quoted=True, missing=missing))
            elif isinstance(part, Substitution):
                chunks += used_in(self.substitute(part), quoted=part.quoted)
            elif isinstance(part, Arithmetic):
                chunks += self._arithmetic(part)
            else:
                chunks += self._parameter(part)
                _check_size(chunks, part)
        return chunks

    def _arithmetic(self, part: Arithmetic) -> Value:
        try:
            return plain(str(self.number(part.expression, part.line)), part.line)
        except Unknown as unknown:
            written = [chunk.missing for chunk in self.text(part.expression)]
            others = dict.fromkeys(one for one in written if one is not None and not one.stand_in)
            return tuple(chunk for one in {unknown.missing: None, **others} for chunk in absent(one))

    def _parameter(self, part: Parameter) -> list[Chunk]:
        part, known = self._selected(part)
        if part.operator in _DEFAULTS:
            chosen = self._default(part, known)
            if chosen is not None:
                # Words of the default that stand in quotes are not divided.
                return [replace(chunk, divides=not (part.quoted or chunk.quoted)) for chunk in chosen]
        elif part.operator == "length":
            return [Chunk(self._length(known), part.line, quoted=True)]
        elif known is not None and part.operator:
            changed = [_bound_as(one, self._changed(one, part)) for one in _items(known)]
            known = changed if isinstance(known, list) else changed[0]
        if known is None:
            known = absent(unset(part.name, part.line))
        sign = part.name if part.index is None else text_of(self.text(part.index))
        items = (known if sign in _ALL else known[:1] or [()]) if isinstance(known, list) else [known]
        is_one_word = sign == "*" and part.quoted
        chunks: list[Chunk] = []
        for number, item in enumerate(items):
            if number:
                line = chunks[-1].line if chunks else part.line
                chunks.append(Chunk(" ", line, quoted=True) if is_one_word else Chunk("", line, is_break=True))
            chunks += used_in(item, quoted=part.quoted) or ([Chunk("", part.line, quoted=True)] if part.quoted else [])
        return chunks

    def _selected(self, part: Parameter) -> tuple[Parameter, Variable | None]:
        """The variable, items or keys that a parameter names, and the parameter without the signs for them."""
        if part.operator == "indirect":
            part = self._indirect(part)
        known = self._known(part.name, part.line)
        if part.operator == "keys":
            return replace(part, operator=""), self._keys(part.name, known, part.line)
        if part.index is not None and known is not None:
            known = self._item(part.name, known, part.index, part.line)
        if part.operator == ":" and isinstance(known, list) and (part.index is not None or part.name in _ALL):
            return replace(part, operator=""), self._slice(known, part)
        return part, known

    def _indirect(self, part: Parameter) -> Parameter:
        """``${!NAME}``, the variable that NAME names, or ``${!NAME[@]}``, the keys of an array."""
        if part.index is not None and text_of(self.text(part.index)) in _ALL:
            return replace(part, operator="keys")
        target = text_of(self._one(self.variable(part.name, part.line)))
        name, bracket, index = target.partition("[")
        place = (Literal(index.rstrip("]"), part.line),) if bracket else part.index
        return replace(part, name=name or part.name, index=place, operator="")

    def _keys(self, name: str, known: Variable | None, line: int) -> Variable:
        keys = self.state.keys.get(name)
        if keys is None:
            keys = [str(place) for place in range(len(known) if isinstance(known, list) else int(known is not None))]
        return [plain(key, line) for key in keys]

    def _slice(self, items: list[Value], part: Parameter) -> Variable:
        """``${A[@]:start:length}``; of the script's arguments the first has the number 1."""
        line = part.line
        first_text, _, count_text = text_of(self.text(part.argument)).partition(":")
        try:
            first = self._number(plain(first_text, line), line, 0)
            count = self._number(plain(count_text, line), line, 0) if count_text.strip() else len(items)
        except Unknown as unknown:
            return [absent(unknown.missing)]
        if part.name in _ALL:
            first = first - 1 if first > 0 else first
        start = max(first + len(items), 0) if first < 0 else first
        return items[start : start + count] if count >= 0 else items[start:count]

    def _item(self, name: str, known: Variable, index: Word, line: int) -> Variable | None:
        text = text_of(self.text(index))
        items = known if isinstance(known, list) else [known]
        if text in _ALL:
            return items
        keys = self.state.keys.get(name)
        if name in self.state.associative:
            return items[keys.index(text)] if keys and text in keys else None
        try:
            place = self._number(plain(text, line), line, 0)
        except (Unknown, ScriptError):
            return None
        if keys is not None:
            return items[keys.index(str(place))] if str(place) in keys else None
        return items[place] if -len(items) <= place < len(items) else None

    def _default(self, part: Parameter, known: Variable | None) -> list[Chunk] | None:
        """``${NAME:-word}`` and its relatives; None for the variable's own value."""
        one = None if known is None else self._one(known)
        is_empty = one is None or (":" in part.operator and not text_of(one) and missing_of(one) is None)
        sign = part.operator[-1]
        if sign == "+":
            nothing = [Chunk("", part.line, quoted=True)] if part.quoted else []
            return nothing if is_empty else self._chunks(part.argument)
        if not is_empty:
            return None
        if sign == "?":
            return list(absent(unset(part.name, part.line)))
        if sign == "=":
            self.state.variables[part.name] = self.text(part.argument)
        return self._chunks(part.argument)

    def _one(self, value: Variable) -> Value:
        return value if not isinstance(value, list) else value[0] if value else ()

    def _length(self, known: Variable | None) -> str:
        return str(len(known) if isinstance(known, list) else len(text_of(known or ())))

    def _changed(self, value: Value, part: Parameter) -> Value:
        """A value after a pattern, a case or a cut. An unknown part stays unknown."""
        if missing_of(value) is not None or not value:
            return value
        text, line = text_of(value), value[0].line
        argument = text_of(self.text(part.argument))
        operator = part.operator
        if operator in ("#", "##", "%", "%%"):
            return plain(_without(text, argument, operator), line)
        if operator in ("/", "//", "/#", "/%"):
            pattern, _, replacement = argument.partition("/")
            regex = translate(pattern).removesuffix("\\z").removesuffix("\\Z")
            regex = f"\\A{regex}" if operator == "/#" else f"{regex}\\Z" if operator == "/%" else regex
            return plain(re.sub(regex, lambda _: replacement, text, count=operator != "//"), line)
        if operator in ("^", "^^", ",", ",,"):
            change = str.upper if operator[0] == "^" else str.lower
            return plain(change(text) if len(operator) > 1 else change(text[:1]) + text[1:], line)
        if operator == ":":
            start, _, length = argument.partition(":")
            try:
                first = self._number(plain(start, line), line, 0)
                count = self._number(plain(length, line), line, 0) if length else len(text)
            except Unknown as unknown:
                return absent(unknown.missing)
            rest = text[first:] if first >= 0 or -first <= len(text) else ""
            return plain(rest[:count], line)
        raise ScriptError(part.line, f"${{{part.name}{operator}...}} cannot be read; write the value instead")


def _check_size(chunks: Sequence[Chunk], part: Parameter) -> None:
    """Stop at a value that grows with each line, as ``A=$A$A``."""
    if len(chunks) > _MOST_CHUNKS or sum(len(chunk.text) for chunk in chunks) > _MOST_LETTERS:
        raise ScriptError(
            part.line, f"{part.shown} makes a value of more than {_MOST_CHUNKS:,} parts or {_MOST_LETTERS:,} letters"
        )


def _items(value: Variable) -> list[Value]:
    return value if isinstance(value, list) else [value]


def _bound_as(before: Value, after: Value) -> Value:
    """A value after a change of its text, which is as bound to a folder as before."""
    if not any(chunk.is_here for chunk in before):
        return after
    return tuple(replace(chunk, is_here=chunk.is_here or not place) for place, chunk in enumerate(after))


def matches(text: str, pattern: str) -> bool:
    """True if a whole text matches a pattern of the shell."""
    return re.match(translate(pattern), text, re.DOTALL) is not None


def _without(text: str, pattern: str, operator: str) -> str:
    """A text without the shortest or longest part at one end that matches a pattern."""
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[:length] if operator[0] == "#" else text[len(text) - length :]
        if matches(part, pattern):
            return text[length:] if operator[0] == "#" else text[: len(text) - length]
    return text


def unset(name: str, line: int, *, is_open: bool = False) -> Missing:
    """The unknown value of a variable that nothing sets; conditions see it as empty unless ``is_open``."""
    what = f"the script's argument ${name}" if name.isdigit() else f"${name}"
    return Missing(line, what, "is not set", name, stand_in=None if is_open else "")
