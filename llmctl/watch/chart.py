"""Charts of characters: a curve with its smallest and largest values, and points. Pure.

A character has 2 x 4 dots of Braille, or 1 x 2 dots on a terminal without Unicode.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from llmctl.runs.number_text import is_utf8
from llmctl.runs.series.curves import Curve

LINE, SPREAD, POINT, AXIS = "cyan", "dim", "yellow", "dim"
"""Styles that suit light and dark terminals."""
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_ASCII = {0: " ", 1: "'", 2: ".", 3: ":"}


@dataclass(frozen=True)
class Chart:
    """A curve over iterations, and points at some of them.

    Attributes:
        iteration: of each point of the curve.
        curve: its numbers.
        text: a number as text.
        point_iteration: of each single point.
        points: their numbers.
    """

    iteration: Sequence[int]
    curve: Curve
    text: Callable[[float], str]
    point_iteration: Sequence[int] = ()
    points: Sequence[float | None] = ()

    def draw(self, width: int, height: int, encoding: str | None) -> list[Text]:
        """Lines of at most ``width`` characters: the chart, and below it the iterations; empty if there is no room."""
        low, high = self._range()
        labels = [self.text(high), self.text((low + high) / 2), self.text(low)]
        margin = max(map(len, labels)) + 1
        rows, columns = height - 1, width - margin - 1
        if rows < 2 or columns < 8 or not self.iteration:
            return []
        canvas = _Canvas(columns, rows, has_braille=is_utf8(encoding))
        self._paint(canvas, low, high)
        bar, corner, dash = ("│", "└", "─") if is_utf8(encoding) else ("|", "+", "-")
        named = {0: labels[0], rows - 1: labels[2]}
        if rows >= 7:
            named[(rows - 1) // 2] = labels[1]
        lines = [
            Text.assemble((named.get(row, "").rjust(margin - 1) + " " + bar, AXIS), line)
            for row, line in enumerate(canvas.lines())
        ]
        first, last = str(self.iteration[0]), str(self.iteration[-1])
        room = columns - len(first) - len(last)
        name = " iteration " if room > 2 * len(" iteration ") else ""
        below = first + name.center(room, dash) + last if room > 0 else last[-columns:].rjust(columns, dash)
        return [*lines, Text(" " * margin + corner + below, AXIS)]

    def _range(self) -> tuple[float, float]:
        known = [value for values in (self.curve.low, self.curve.high, self.points) for value in values if _is(value)]
        low, high = min(known, default=0.0), max(known, default=1.0)  # type: ignore[type-var]
        if low == high:
            return low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2  # type: ignore[operator, arg-type]
        return low, high  # type: ignore[return-value]

    def _paint(self, canvas: "_Canvas", low: float, high: float) -> None:
        first, last = self.iteration[0], self.iteration[-1]

        def x(iteration: int) -> int:
            return round((iteration - first) / max(1, last - first) * (canvas.dots_wide - 1))

        def y(value: float) -> int:
            # Halves: the difference of two large numbers would overflow.
            return round((high / 2 - value / 2) / (high / 2 - low / 2) * (canvas.dots_high - 1))

        before: tuple[int, int] | None = None
        for step, mean, least, most in zip(
            self.iteration, self.curve.mean, self.curve.low, self.curve.high, strict=True
        ):
            if mean is None or least is None or most is None:
                before = None
                continue
            here = x(step), y(mean)
            canvas.segment((here[0], y(most)), (here[0], y(least)), canvas.spread)
            canvas.segment(before or here, here, canvas.line)
            before = here
        for step, value in zip(self.point_iteration, self.points, strict=True):
            if value is not None and first <= step <= last:
                canvas.point(x(step), y(value))


def _is(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass
class _Canvas:
    """Dots in cells. A cell has one colour: that of the line, if the line has a dot in it."""

    columns: int
    rows: int
    has_braille: bool
    line: dict[tuple[int, int], int] = field(default_factory=dict)
    spread: dict[tuple[int, int], int] = field(default_factory=dict)
    marks: set[tuple[int, int]] = field(default_factory=set)

    @property
    def dots_wide(self) -> int:
        return self.columns * (2 if self.has_braille else 1)

    @property
    def dots_high(self) -> int:
        return self.rows * (4 if self.has_braille else 2)

    def segment(self, begin: tuple[int, int], end: tuple[int, int], layer: dict[tuple[int, int], int]) -> None:
        steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
        for step in range(steps + 1):
            x = begin[0] + round((end[0] - begin[0]) * step / steps)
            y = begin[1] + round((end[1] - begin[1]) * step / steps)
            cell, bit = self._place(x, y)
            layer[cell] = layer.get(cell, 0) | bit

    def point(self, x: int, y: int) -> None:
        self.marks.add(self._place(x, y)[0])

    def _place(self, x: int, y: int) -> tuple[tuple[int, int], int]:
        if self.has_braille:
            return (x // 2, y // 4), _BRAILLE[y % 4][x % 2]
        return (x, y // 2), 1 << (y % 2)

    def lines(self) -> list[Text]:
        found = []
        for row in range(self.rows):
            cells = [self._cell((column, row)) for column in range(self.columns)]
            line = Text(no_wrap=True)
            # Neighbours of one colour together: thousands of small spans would slow every frame.
            for colour, group in groupby(cells, key=itemgetter(1)):
                line.append("".join(character for character, _ in group), colour)
            found.append(line)
        return found

    def _cell(self, cell: tuple[int, int]) -> tuple[str, str]:
        if cell in self.marks:
            return "●" if self.has_braille else "o", POINT
        own = self.line.get(cell, 0)
        bits = own | self.spread.get(cell, 0)
        character = _ASCII[bits] if not self.has_braille else chr(0x2800 + bits) if bits else " "
        return character, LINE if own else SPREAD
