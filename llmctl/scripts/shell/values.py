"""Values of a script's variables: text with the lines it was written on, and the parts that nobody can know here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

LEFT_OPEN = "is a place that the script leaves open"
"""Reason of a ``Missing`` for words such as ``<path to the data>``."""
OF_A_PATTERN = "is the name of a file that only the job knows"
"""Reason of a ``Missing`` for the files that a pattern finds, as in ``for file in data/*.bin``."""
_PATTERN = re.compile(r"[*?]|\[[^\]]+\]")


@dataclass(frozen=True)
class Missing:
    """A part of a value that is known only when the script runs.

    Attributes:
        line: of the script.
        what: as written, such as ``$(date)``.
        why: clause that continues the sentence, such as "is never executed".
        name: variable that the user can set with --arg instead.
        stand_in: text that conditions see, as on the first rank: "" for a variable that is not set; None if unknown.
    """

    line: int
    what: str
    why: str
    name: str = ""
    stand_in: str | None = None

    @property
    def problem(self) -> str:
        """One sentence without the line."""
        remedy = f"give the value with --arg {self.name}=VALUE" if self.name else "write the value into the script"
        return f"{self.what} {self.why}; {remedy}"

    @property
    def problem_of_word(self) -> str:
        """The same for a word of its own, which bash leaves out if it is empty."""
        return f"{self.problem}, or --arg {self.name}= to leave it out, as bash does" if self.name else self.problem


@dataclass(frozen=True)
class Chunk:
    """Text from one line of the script.

    Attributes:
        text: empty if the part is missing.
        line: where the text stands, not where the variable is used.
        quoted: True for text in quotes, which is never divided into words and makes a word even if empty.
        divides: True for the value of an unquoted variable, which white space divides into words.
        missing: set if the text is unknown.
        is_break: True for the boundary between two items of an array.
        source: variable of the environment that the text is the value of; empty for other text.
        is_here: True for a path that the script found from the folder in which it starts; no ``cd`` moves it.
    """

    text: str
    line: int
    quoted: bool = False
    divides: bool = False
    missing: Missing | None = None
    is_break: bool = False
    is_here: bool = False
    source: str = ""


Value = tuple[Chunk, ...]


def plain(text: str, line: int) -> Value:
    """A known value."""
    return (Chunk(text, line, quoted=True),)


def absent(missing: Missing) -> Value:
    """An unknown value."""
    return (Chunk("", missing.line, quoted=True, missing=missing),)


def text_of(value: Iterable[Chunk]) -> str:
    """The text; an unknown part counts as empty, as bash counts an unset variable."""
    return "".join(chunk.text for chunk in value)


def missing_of(value: Iterable[Chunk]) -> Missing | None:
    """The first unknown part, if any."""
    return next((chunk.missing for chunk in value if chunk.missing is not None), None)


def lines_of(text: str, line: int, *, quoted: bool) -> list[Chunk]:
    """Divide literal text at its line ends, so that every chunk has its own line."""
    return [
        Chunk(part, line + number, quoted=quoted)
        for number, part in enumerate(text.splitlines(keepends=True) or ([""] if quoted else []))
    ]


def used_in(value: Iterable[Chunk], *, quoted: bool) -> list[Chunk]:
    """The chunks of a variable's value where the variable is used."""
    return [replace(chunk, quoted=quoted, divides=not quoted) for chunk in value]


def named_after(value: Value, name: str) -> Value:
    """The value of an assignment: an unknown part without a name can be given as the variable ``name``."""
    return tuple(
        replace(chunk, missing=replace(chunk.missing, name=name))
        if chunk.missing is not None and not chunk.missing.name
        else chunk
        for chunk in value
    )


def words_of(chunks: Iterable[Chunk]) -> list[Value]:
    """Divide expanded chunks into words, as bash divides at white space in unquoted values."""
    words: list[list[Chunk]] = [[]]
    for chunk in chunks:
        if chunk.is_break:
            words.append([])
        elif chunk.divides and chunk.missing is None:
            _divide(chunk, words)
        elif chunk.text or chunk.quoted or chunk.missing is not None:
            words[-1].append(chunk)
    return [tuple(word) for word in words if word]


def _divide(chunk: Chunk, words: list[list[Chunk]]) -> None:
    """Append the words of an unquoted value; white space at its ends ends the words beside it."""
    for number, part in enumerate(re.split(r"\s+", chunk.text)):
        if number:
            words.append([])
        if part:
            words[-1].append(replace(chunk, text=part))


def is_pattern(word: Value) -> bool:
    """True for a word that the shell replaces with the names of files."""
    return any(not chunk.quoted and chunk.missing is None and _PATTERN.search(chunk.text) for chunk in word)


def is_of_a_pattern(value: Value) -> bool:
    """True for a value with the unknown name of a file that a pattern finds."""
    return any(chunk.missing is not None and chunk.missing.why == OF_A_PATTERN for chunk in value)


def without_line_ends(value: Value) -> Value:
    """The output of a command as ``$( )`` gives it, without the line ends at its end."""
    chunks = list(value)
    while chunks and chunks[-1].missing is None:
        last = chunks.pop()
        if text := last.text.rstrip("\n"):
            return (*chunks, replace(last, text=text))
    return tuple(chunks)
