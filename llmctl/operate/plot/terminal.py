"""A chart as text, by plotext: lines of braille dots, with ticks at round numbers."""

import math
from collections.abc import Callable
from typing import Any

from llmctl.operate.plot.charts import Chart
from llmctl.operate.plot.ticks import log_ticks, round_ticks, tick_labels
from llmctl.terminal_text import printable

COLOURS = ((6, "cyan"), (3, "yellow"), (2, "green"), (5, "magenta"), (4, "blue"), (1, "red"))
"""Number of a terminal's own colour, which suits its background, and name for plotext."""
_SPREAD = "gray"
_MARKS = "*+xo#@"
_ASCII = str.maketrans("┌┐└┘┤├┬┴│─┼•", "++++|||||-+*")
_SMALLEST = (30, 8)
_COLUMNS_PER_TICK = 16
_ROWS_PER_TICK = 4
_TICKS = 3
"""Of a small chart."""


def chart_text(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    """The chart in ``height`` lines of at most ``width`` columns, its key and the runs above it.

    Runs differ by colour; without colours, or in ASCII, by the characters of their lines.
    """
    width, height = max(width, _SMALLEST[0]), max(height, _SMALLEST[1])
    by_mark = not unicode or (not colour and len({line.run for line in chart.lines}) > 1)
    legend = _legend(chart, width, colour=colour, by_mark=by_mark)
    drawn = draw_lines(chart, width, height - len(legend), colour=colour, unicode=unicode, by_mark=by_mark)
    return "\n".join([*legend, *drawn])


def draw_lines(
    chart: Chart,
    width: int,
    height: int,
    *,
    colour: bool,
    unicode: bool,
    by_mark: bool,
    labels: Callable[[list[float]], list[str]] = tick_labels,
) -> list[str]:
    """The chart without a legend, in ``height`` lines of at most ``width`` columns.

    Args:
        chart: of at least one line.
        width: columns, with those of the labels.
        height: lines, with that of the x axis and that of its labels.
        colour: one run has a line of its colour, and dim dots from the smallest to the largest value of each point.
        unicode: braille and box characters; else ASCII.
        by_mark: each line has a character of its own.
        labels: texts of the ticks of the y axis.
    """
    # Loaded by a plot alone: 0.3 s.
    from plotext import figure, marker, terminal, uncolorize

    # The caller knows the room, and standard output may not be a terminal.
    terminal.limit(False, False)
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.axes(False, axis="x", side="upper")
    figure.axes(False, axis="y", side="right")
    has_spread = colour and not by_mark and len({line.run for line in chart.lines if not line.is_sparse}) == 1
    values: list[float] = []
    for number, line in enumerate(chart.lines):
        if has_spread and line.low:
            ends = _scaled(chart, [value for pair in zip(line.low, line.high, strict=True) for value in pair])
            spread = figure.signal([x for x in line.x for _ in range(2)], ends, marker=marker("braille", pixel=_SPREAD))
            spread.lines(True)
            figure.draw(spread)
            values += ends
        symbol = _mark(number) if by_mark else "•" if line.is_sparse else "braille"
        y = _scaled(chart, line.y)
        values += y
        signal = figure.signal(line.x, y, marker=marker(symbol, pixel=COLOURS[line.run % len(COLOURS)][1]))
        signal.lines(len(line.x) > 1 and not line.is_sparse)
        figure.draw(signal)
    _set_ticks(figure, chart, values, (width, height), labels)
    text = str(figure.build()) if colour else uncolorize(figure.build())
    lines = text.rstrip("\n").split("\n")
    return [line.rstrip() if unicode else line.rstrip().translate(_ASCII) for line in lines]


def _scaled(chart: Chart, values: list[float]) -> list[float]:
    return [math.log10(value) for value in values] if chart.is_log else values


def _set_ticks(
    figure: Any,
    chart: Chart,
    values: list[float],
    size: tuple[int, int],
    labels: Callable[[list[float]], list[str]],
) -> None:
    ruler = figure.ruler
    columns, rows = max(_TICKS, size[0] // _COLUMNS_PER_TICK), max(_TICKS, size[1] // _ROWS_PER_TICK)
    if chart.is_log:
        places = log_ticks(min(values), max(values), rows)
        ruler("y").ticks(places, labels([10.0**place for place in places]))
    else:
        places = round_ticks(min(values), max(values), rows)
        ruler("y").ticks(places, labels(places))
    # Without these the outermost ticks would cut the lines.
    _set_limits(ruler("y"), values)
    xs = [x for line in chart.lines for x in (line.x[0], line.x[-1])]
    places = round_ticks(min(xs), max(xs), columns)
    ruler("x").ticks(places, tick_labels(places))
    _set_limits(ruler("x"), xs)


def _set_limits(ruler: Any, values: list[float]) -> None:
    """Show all values; plotext itself widens the range of a single one, and cannot draw one without an end."""
    if 0 < max(values) - min(values) < math.inf:
        ruler.lim(min(values), max(values))


def _legend(chart: Chart, width: int, *, colour: bool, by_mark: bool) -> list[str]:
    """Lines with the key, the axis and the names, each name beside its mark."""
    scale = ", logarithmic" if chart.is_log else ""
    lines, room = [f"{printable(chart.key)} over {chart.x_label}{scale}"[:width]], 0
    for number, line in enumerate(chart.lines):
        mark = _mark(number) if by_mark else "•" if line.is_sparse else "─"
        name = printable(line.name)[: width - 4]
        shown = f"\x1b[3{COLOURS[line.run % len(COLOURS)][0]}m{mark}\x1b[0m {name}" if colour else f"{mark} {name}"
        if room < len(name) + 4:
            lines.append(shown)
            room = width - len(name) - 2
        else:
            lines[-1] += f"  {shown}"
            room -= len(name) + 4
    return lines


def _mark(number: int) -> str:
    return _MARKS[number % len(_MARKS)]
