"""Syntax tree of a bash script. Every part has the line that it stands on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Literal:
    """Text as written; ``is_open`` for text outside quotes."""

    text: str
    line: int
    is_open: bool = True


@dataclass(frozen=True)
class Placeholder:
    """``<Specify path>``: a place that the script's reader is to fill in."""

    text: str
    line: int


@dataclass(frozen=True)
class Parameter:
    """``$NAME`` or ``${NAME...}``.

    Attributes:
        name: of the variable, or a digit or sign for positional and special parameters.
        line: of the dollar.
        quoted: True inside double quotes.
        index: between brackets, if any; ``@`` and ``*`` mean all.
        operator: such as ``:-`` or ``%``; ``#`` before the name is ``length``, ``!`` is ``indirect``.
        argument: after the operator.
    """

    name: str
    line: int
    quoted: bool
    index: Word | None = None
    operator: str = ""
    argument: Word = ()

    @property
    def shown(self) -> str:
        """As in a message."""
        return f"${self.name}"


@dataclass(frozen=True)
class Substitution:
    """``$(command)`` or backquotes; never executed."""

    source: str
    line: int
    quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """``$((expression))``."""

    expression: Word
    line: int
    quoted: bool


Part = Literal | Placeholder | Parameter | Substitution | Arithmetic
Word = tuple[Part, ...]


def joined(parts: Iterable[Part]) -> Word:
    """A word in which neighbouring literals of the same kind and line are one; a line end ends its literal."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            isinstance(part, Literal)
            and isinstance(last, Literal)
            and last.is_open == part.is_open
            and not last.text.endswith("\n")
            and last.line == part.line
        ):
            found[-1] = Literal(last.text + part.text, last.line, last.is_open)
        else:
            found.append(part)
    return tuple(found)


@dataclass(frozen=True)
class Assignment:
    """``NAME=value``, ``NAME+=value``, ``NAME[i]=value`` or ``NAME=(items)``.

    Attributes:
        name: of the variable.
        line: of the assignment.
        value: unless items are assigned.
        items: of an array; None for a value.
        index: between brackets after the name.
        appends: True for ``+=``.
        places: the index of each item; None for the next place.
    """

    name: str
    line: int
    value: Word = ()
    items: tuple[Word, ...] | None = None
    index: Word | None = None
    appends: bool = False
    places: tuple[Word | None, ...] = ()


@dataclass(frozen=True)
class Redirect:
    """``> file``, or a here-document, which is its own content."""

    operator: str
    target: Word
    line: int


@dataclass
class HereDocument:
    """Content of a here-document, read after the line that asks for it."""

    delimiter: str
    line: int
    is_literal: bool
    strips_tabs: bool
    content: list[Word] = field(default_factory=list)


@dataclass(frozen=True)
class Simple:
    """A command with its assignments."""

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...] = ()
    documents: tuple[HereDocument, ...] = ()


@dataclass(frozen=True)
class If:
    """``if``: conditions with their bodies; ``otherwise`` is the ``else``."""

    line: int
    arms: tuple[tuple[Block, Block], ...]
    otherwise: Block


@dataclass(frozen=True)
class While:
    """``while`` or, with ``until``, its opposite."""

    line: int
    condition: Block
    body: Block
    until: bool


@dataclass(frozen=True)
class For:
    """``for NAME in words``; without words over the positional parameters."""

    line: int
    name: str
    words: tuple[Word, ...] | None
    body: Block


@dataclass(frozen=True)
class ForArithmetic:
    """``for ((start; condition; step))``."""

    line: int
    start: Word
    condition: Word
    step: Word
    body: Block


@dataclass(frozen=True)
class Case:
    """``case WORD in patterns) body;; esac``."""

    line: int
    word: Word
    arms: tuple[tuple[tuple[Word, ...], Block], ...]


@dataclass(frozen=True)
class Group:
    """``{ ...; }`` or, as ``is_subshell``, ``( ... )``."""

    line: int
    body: Block
    is_subshell: bool


@dataclass(frozen=True)
class Test:
    """``[[ ... ]]``."""

    line: int
    words: tuple[Word, ...]


@dataclass(frozen=True)
class ArithmeticCommand:
    """``(( ... ))``."""

    line: int
    expression: Word


@dataclass(frozen=True)
class Function:
    """A function's definition."""

    line: int
    name: str
    body: Block


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by ``|``."""

    line: int
    commands: tuple[Command, ...]
    is_negated: bool = False


@dataclass(frozen=True)
class Chain:
    """Commands joined by ``&&`` and ``||``."""

    line: int
    first: Command
    rest: tuple[tuple[str, Command], ...]


Command = (
    Simple | If | While | For | ForArithmetic | Case | Group | Test | ArithmeticCommand | Function | Pipeline | Chain
)
Block = tuple[Command, ...]
