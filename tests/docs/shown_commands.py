"""Command lines that the pages show, in indented or fenced blocks and in code words.

A comment before a block names a need that a machine with this repository alone does not meet, so that nothing of the
block runs: ``<!-- needs: a cluster -->``. With ``<!-- needs: a GPU: nvidia-smi -->`` this holds for the lines with
that text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHELL = re.compile(r"(llmctl|make|pip|python -m|\.venv/bin/\S+) ")
_NEED = re.compile(r"<!-- needs: ([^:]+?)(?:: (.+))? -->")
_IN_TEXT = re.compile(r"`(llmctl [^`\n]*)`")


@dataclass(frozen=True)
class Shown:
    """One command line of a page; ``needs`` is what it needs, empty for a command that a test runs."""

    page: Path
    number: int
    text: str
    needs: str = ""

    @property
    def place(self) -> str:
        """Page, line and command, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.number}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The words of the command without its comment, up to a pipe or a redirection."""
        words = shlex.split(self.text, comments=True)
        ends = [words.index(sign) for sign in ("|", ">") if sign in words]
        return words[: min(ends)] if ends else words


def commands_of(page: Path, text: str | None = None) -> Iterator[Shown]:
    """Yield the command lines of all blocks of a page."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    needs: dict[str, str] = {}
    fenced = False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            command = line.strip()
            if _SHELL.match(command):
                own, _, _ = command.partition(" #")
                yield Shown(page, number, command, next((needs[part] for part in needs if part in own), ""))
        elif found := _NEED.fullmatch(line):
            needs[found[2] or ""] = found[1]
        elif line:
            needs = {}


def commands_in_text(page: Path) -> Iterator[Shown]:
    """Yield the code words of a page that begin with ``llmctl``."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("    "):
            yield from (Shown(page, number, command, "a reader") for command in _IN_TEXT.findall(line))
