"""Tables of one line per row, laid out for the width of the terminal. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

WIDE = 100
"""Columns from which a table has wide spacing."""
_LEAST_FILL = 16
"""Narrowest column of sentences: a narrower one tells nothing."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its header.
        is_number: aligned to the right.
        leaves: the order in which columns are left out if there is no room; None: never.
        fills: a column of sentences that takes the room that is left, and is cut there.
    """

    name: str
    is_number: bool = False
    leaves: int | None = None
    fills: bool = False


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> tuple[Text, list[Text]]:
    """Header and lines of a table. Columns without any value are left out to save width.

    Args:
        columns: of the table.
        rows: one text per column; ``-`` or nothing where there is no value.
        width: of the terminal.
    """
    gap = 2 if width >= WIDE else 1
    widths = [
        max([cell_len(column.name), *(row[number].cell_len for row in rows)]) for number, column in enumerate(columns)
    ]
    shown = [
        number
        for number, column in enumerate(columns)
        if not rows or column.leaves is None or {row[number].plain for row in rows} - {"-", ""}
    ]
    fill = next((number for number in shown if columns[number].fills), None)
    if fill is not None:
        widths[fill] = min(widths[fill], _LEAST_FILL)
    leaving = sorted((column.leaves, number) for number, column in enumerate(columns) if column.leaves is not None)
    for _, number in leaving:
        if _needed(shown, widths, gap) <= width:
            break
        if number in shown:
            shown.remove(number)
    spare = width - _needed(shown, widths, gap)
    if fill in shown and spare > 0:
        widths[fill] += spare
    elif spare < 0 and shown:
        widths[shown[0]] = max(8, widths[shown[0]] + spare)
    header = _line([Text(columns[number].name, "bold") for number in shown], shown, columns, widths, gap)
    return header, [_line([row[number] for number in shown], shown, columns, widths, gap) for row in rows]


def _needed(shown: Sequence[int], widths: Sequence[int], gap: int) -> int:
    return sum(widths[number] for number in shown) + gap * (len(shown) - 1)


def _line(
    cells: Sequence[Text], shown: Sequence[int], columns: Sequence[Column], widths: Sequence[int], gap: int
) -> Text:
    line = Text(no_wrap=True, end="")
    for position, (number, cell) in enumerate(zip(shown, cells, strict=True)):
        text = shortened(cell, widths[number])
        room = " " * (widths[number] - text.cell_len)
        parts = (room, text) if columns[number].is_number else (text, room)
        line.append(" " * gap if position else "")
        for part in parts:
            line.append(part) if isinstance(part, str) else line.append_text(part)
    return line


def shortened(text: Text, width: int) -> Text:
    """The text, or its beginning with dots."""
    if text.cell_len <= width:
        return text
    cut = text.copy()
    cut.truncate(max(0, width - 3))
    return cut.append("..."[:width])
