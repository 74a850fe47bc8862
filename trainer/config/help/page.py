"""A help page: usage, text, and sections of rows, laid out for a width.

llmctl shows its own commands and those of the trainer with it, so that all pages look the same. Plain text needs the
standard library only: ``python -m trainer`` works on nodes without typer and rich.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDEST = 120
"""Columns of a page at most: longer lines are hard to read."""
_INDENT, _GAP = "  ", 2


class Row(NamedTuple):
    """A command, an argument or an option, and its description."""

    name: str
    text: str


class Section(NamedTuple):
    """Rows under a heading: commands, or arguments and options."""

    title: str
    rows: tuple[Row, ...]
    is_commands: bool = False


class HelpPage(NamedTuple):
    """The parts of a page.

    Attributes:
        usage: the command line, without the word Usage.
        paragraphs: what the command does.
        sections: commands, arguments and options.
        notes: paragraphs at the end.
    """

    usage: str
    paragraphs: tuple[str, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()


HELP_ROW = Row("-h, --help", "Show this message and exit.")


def page_width() -> int:
    """Columns of the terminal, or of COLUMNS, or 80, up to the widest page."""
    return min(shutil.get_terminal_size().columns, WIDEST)


def join_sections(*groups: Sequence[Section]) -> tuple[Section, ...]:
    """One section per title, in the order of their first appearance; empty ones are left out."""
    joined: dict[str, Section] = {}
    for section in (section for group in groups for section in group if section.rows):
        before = joined.get(section.title, section._replace(rows=()))
        joined[section.title] = before._replace(rows=(*before.rows, *section.rows))
    return tuple(joined.values())


def with_help_row(sections: Sequence[Section]) -> tuple[Section, ...]:
    """Add --help to the general options, or else to the last section of options."""
    of_options = [section.title for section in sections if section.rows[0].name.startswith("-")]
    title = "Options" if "Options" in of_options or not of_options else of_options[-1]
    return join_sections(sections, [Section(title, (HELP_ROW,))])


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of a paragraph; words with hyphens, such as flags, stay whole."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def usage_lines(page: HelpPage, width: int) -> list[str]:
    """Lines of the usage; those after the first one are indented."""
    lines = textwrap.wrap(page.usage, max(width - len("Usage: "), 1), break_on_hyphens=False)
    return [("Usage: " if number == 0 else " " * len("Usage: ")) + line for number, line in enumerate(lines)]


def section_lines(page: HelpPage, section: Section, width: int) -> Iterator[tuple[str, str]]:
    """Lines of a section, each as its part of the name, filled up with spaces, and its part of the description."""
    left = _name_column(page, section, width) + _GAP
    for row in section.rows:
        texts = wrapped(row.text, max(width - left, 1)) or [""]
        if len(row.name) + _GAP <= left:
            yield row.name.ljust(left if texts[0] else 0), texts.pop(0)
        else:
            yield from ((part, "") for part in wrapped(row.name, width))
        yield from ((" " * left, text) for text in texts)


def _name_column(page: HelpPage, like: Section, width: int) -> int:
    """Width of the names in sections of one kind, which are aligned. A longer name gets a line of its own."""
    widest = max(width * 3 // 8, 1)
    lengths = [
        len(row.name) for section in page.sections if section.is_commands == like.is_commands for row in section.rows
    ]
    return max((length for length in lengths if length <= widest), default=0)


def plain_text(page: HelpPage, width: int) -> str:
    """The page as text without colours or boxes."""
    blocks = [usage_lines(page, width), *(wrapped(text, width, _INDENT) for text in page.paragraphs)]
    inner = width - len(_INDENT)
    for section in page.sections:
        lines = (_INDENT + name + text for name, text in section_lines(page, section, inner))
        blocks.append([f"{section.title}:", *lines])
    blocks += [wrapped(text, width, _INDENT) for text in page.notes]
    return "\n\n".join("\n".join(lines) for lines in blocks)
