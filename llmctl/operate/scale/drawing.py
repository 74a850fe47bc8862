"""Tokens per second over nodes as a picture: measured, predicted and ideal, on logarithmic axes. Pure."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from llmctl.operate.plot.charts import Chart, Line
from llmctl.operate.scale.table import ScaleRow
from llmctl.runs.number_text import rate_text

_WIDTH, _HEIGHT = 640, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 56, 56
# Colours that people with a colour vision deficiency tell apart (Okabe and Ito, 2008).
_COLOURS = {"measured": "#0072b2", "predicted": "#d55e00", "ideal": "#777777"}
_DASHES = {"measured": "", "predicted": "6 4", "ideal": "2 3"}
_MOST_TICKS = 6


def lines_of(rows: Sequence[ScaleRow]) -> dict[str, list[tuple[int, float]]]:
    """Name -> nodes and tokens per second: measured, predicted, and ideal, which grows with the devices.

    The ideal begins at the smallest measured size, or at the smallest predicted one before anything is measured.
    """
    measured = [(row, row["tokens_per_s"]) for row in rows if row["tokens_per_s"] is not None]
    predicted = [(row, row["predicted_tokens_per_s"]) for row in rows if row["predicted_tokens_per_s"] is not None]
    known = [(row, rate) for row, rate in measured or predicted if rate is not None]
    if not known:
        return {}
    first, rate = known[0]
    ideal = [(row["nodes"], rate * row["devices"] / first["devices"]) for row in rows]
    found = {
        "measured": [(row["nodes"], each) for row, each in measured if each is not None],
        "predicted": [(row["nodes"], each) for row, each in predicted if each is not None],
        "ideal": [(nodes, each) for nodes, each in ideal if nodes >= first["nodes"]],
    }
    return {name: points for name, points in found.items() if points}


def chart_of(rows: Sequence[ScaleRow]) -> Chart | None:
    """The same lines for a terminal, on linear axes, where the ideal is a straight line too; None without a line."""
    found = lines_of(rows)
    if max((len(points) for points in found.values()), default=0) < 2:
        return None
    lines = [
        Line(name, number, [float(nodes) for nodes, _ in points], [rate for _, rate in points], [], [])
        for number, (name, points) in enumerate(found.items())
    ]
    return Chart("tokens/s", "nodes", lines)


def svg_of(title: str, rows: Sequence[ScaleRow]) -> str:
    """The picture; the same rows give the same text."""
    found = lines_of(rows)
    points = [point for line in found.values() for point in line]
    plane = _Plane([nodes for nodes, _ in points] or [1], [rate for _, rate in points] or [1.0])
    inner = [*plane.grid(sorted({row["nodes"] for row in rows}))]
    for number, (name, line) in enumerate(found.items()):
        inner += [*_legend(name, number), *plane.line(name, line)]
    body = "\n".join(inner)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n<title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n'
        f'<text x="{_LEFT}" y="22" font-size="14" fill="#222222">{escape(title)}</text>\n{body}\n</svg>\n'
    )


class _Plane:
    """Two logarithmic axes."""

    def __init__(self, nodes: Sequence[int], rates: Sequence[float]) -> None:
        self._x = _widened(min(nodes), max(nodes))
        self._y = _widened(min(rates), max(rates))

    def x(self, nodes: float) -> float:
        low, high = self._x
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(nodes / low) / math.log(high / low)

    def y(self, rate: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * math.log(rate / low) / math.log(high / low)

    def grid(self, nodes: Sequence[int]) -> Iterator[str]:
        """Lines at the sizes and at round rates, with their numbers, and the names of the axes."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for each in nodes:
            x = self.x(each)
            yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e0e0e0"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#444444">{each}</text>'
        for rate in _round_numbers(*self._y):
            y = self.y(rate)
            yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e0e0e0"/>'
            words = rate_text(rate)
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444444">{words}</text>'
        middle = (_LEFT + right) / 2
        yield f'<text x="{middle:.0f}" y="{_HEIGHT - 14}" text-anchor="middle" fill="#222222">nodes</text>'
        yield f'<text x="{_LEFT}" y="{_TOP - 12}" text-anchor="end" fill="#222222">tokens/s</text>'

    def line(self, name: str, points: Sequence[tuple[int, float]]) -> Iterator[str]:
        """The line of the points, and a mark at each that is not the ideal."""
        places = [(self.x(nodes), self.y(rate)) for nodes, rate in points]
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{shown}" fill="none" {_stroke(name)}/>'
        if name != "ideal":
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_COLOURS[name]}"/>' for x, y in places)


def _stroke(name: str) -> str:
    dashes = f' stroke-dasharray="{_DASHES[name]}"' if _DASHES[name] else ""
    return f'stroke="{_COLOURS[name]}" stroke-width="1.8"{dashes}'


def _legend(name: str, number: int) -> Iterator[str]:
    x = _WIDTH - _RIGHT - 300 + 104 * number
    yield f'<line x1="{x}" y1="{_TOP - 16}" x2="{x + 24}" y2="{_TOP - 16}" {_stroke(name)}/>'
    yield f'<text x="{x + 30}" y="{_TOP - 12}" fill="#222222">{name}</text>'


def _widened(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis: some room on both sides, and twice as far for one number alone."""
    room = 1.15 if high > low else 2.0
    return low / room, high * room


def _round_numbers(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times a power of ten between two numbers; powers of ten alone if there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [part * 10.0**power for power in powers for part in (1, 2, 5) if low <= part * 10.0**power <= high]
    tens = [number for number in found if f"{number:e}".startswith("1.0")]
    return found if len(found) <= _MOST_TICKS or not tens else tens
