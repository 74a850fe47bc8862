"""A chart as text, by plotext: lines of braille dots, with ticks at round numbers."""

import math

from llmctl.operate.plot.charts import Chart
from llmctl.operate.plot.ticks import log_ticks, round_ticks, tick_labels
from llmctl.terminal_text import printable

COLOURS = ((4, "blue"), (3, "yellow"), (2, "green"), (5, "magenta"), (6, "cyan"), (1, "red"))
"""Number of a terminal's own colour, which suits its background, and name for plotext."""
_MARKS = "*+xo#@"
_ASCII = str.maketrans("┌┐└┘┤├┬┴│─┼•", "++++|||||-+*")
_SMALLEST = (30, 8)
_COLUMNS_PER_TICK = 16
_ROWS_PER_TICK = 4


def chart_text(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    """The chart in ``height`` lines of at most ``width`` columns, its key and the runs above it.

    Runs differ by colour; without colours, or in ASCII, by the characters of their lines.
    """
    # Loaded by a plot alone: 0.3 s.
    from plotext import figure, marker, uncolorize

    width, height = max(width, _SMALLEST[0]), max(height, _SMALLEST[1])
    by_mark = not unicode or (not colour and len({line.run for line in chart.lines}) > 1)
    legend = _legend(chart, width, colour=colour, by_mark=by_mark)
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height - len(legend))
    figure.axes(False, axis="x", side="upper")
    figure.axes(False, axis="y", side="right")
    values: list[float] = []
    for number, line in enumerate(chart.lines):
        symbol = _mark(number) if by_mark else "•" if line.is_sparse else "braille"
        y = [math.log10(value) for value in line.y] if chart.is_log else line.y
        values += y
        signal = figure.signal(line.x, y, marker=marker(symbol, pixel=COLOURS[line.run % len(COLOURS)][1]))
        signal.lines(len(line.x) > 1 and not line.is_sparse)
        figure.draw(signal)
    _set_ticks(figure, chart, values, width, height)
    text = str(figure.build()) if colour else uncolorize(figure.build())
    lines = [*legend, *text.rstrip("\n").split("\n")]
    return "\n".join(line.rstrip() if unicode else line.rstrip().translate(_ASCII) for line in lines)


def _set_ticks(figure: object, chart: Chart, values: list[float], width: int, height: int) -> None:
    ruler = figure.ruler  # type: ignore[attr-defined]
    rows = max(2, height // _ROWS_PER_TICK)
    if chart.is_log:
        places = log_ticks(min(values), max(values), rows)
        ruler("y").ticks(places, tick_labels([10.0**place for place in places]))
    else:
        places = round_ticks(min(values), max(values), rows)
        ruler("y").ticks(places, tick_labels(places))
    xs = [x for line in chart.lines for x in (line.x[0], line.x[-1])]
    places = round_ticks(min(xs), max(xs), max(2, width // _COLUMNS_PER_TICK))
    ruler("x").ticks(places, tick_labels(places))


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
