"""Parts of a page in Markdown, and the error of a part without a text."""

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")


class MissingText(Exception):
    """A key, command or flag that nothing in the code explains."""


def prose(text: str) -> str:
    """A text of the code as Markdown: outside code words, ``<`` begins no tag and ``*`` no emphasis."""
    parts = _CODE.split(text)
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    return "".join(parts)


def required_text(what: str, text: str, where: str) -> str:
    """The text as Markdown.

    Raises:
        MissingText: it is empty; names what has no text, and where it belongs.
    """
    if not text:
        raise MissingText(f"{what}: has no text; write one {where}")
    return prose(text)


def code(text: str) -> str:
    """A code word."""
    return f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A ``|`` in a cell does not end it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def page(*blocks: str) -> str:
    """Blocks as one page."""
    return "\n\n".join(block for block in blocks if block) + "\n"
