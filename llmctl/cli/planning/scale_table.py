"""The tables and the plot of ``llmctl scale`` as text."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmctl.cli.console import is_for_people
from llmctl.context import Context
from llmctl.operate.scale.table import rows_of
from llmctl.runs.number_text import is_utf8, rate_text

if TYPE_CHECKING:
    from llmctl.operate.scale.table import ScaleRow, SizeState

_MEASURED = (
    *("RUN", "NODES", "DEVICES", "BATCH", "S/STEP", "TOKENS/S", "PER DEVICE", "EFFICIENCY"),
    *("PREDICTED", "ERROR", "STATE"),
)
_PREDICTED = ("RUN", "NODES", "DEVICES", "BATCH", "S/STEP", "TOKENS/S", "PER DEVICE", "EFFICIENCY", "STATE")
_LEFT = ("RUN", "STATE")
"""Columns of text; the others are numbers."""
_ABSENT = "-"
_PLOT_ROWS = 16


def measured_lines(name: str, states: "Sequence[SizeState]") -> list[str]:
    """The heading and a line for each size. A line does not change when those below it do."""
    rows = []
    for row in rows_of(states):
        rate, share, error = row["tokens_per_s"], row["efficiency"], row["prediction_error"]
        numbers = _numbers(row, row["iteration_time_s"], rate, share)
        shown = _ABSENT if error is None else f"{100 * error:+.1f}%"
        predicted = _seconds(row["predicted_iteration_time_s"])
        state = row["state"] or "not submitted"
        rows.append((_run(name, row), *numbers, predicted, shown, state))
    return list(_lines(_MEASURED, rows))


def predicted_lines(name: str, states: "Sequence[SizeState]") -> list[str]:
    """The same of sizes that have not run, with the speed that is predicted."""
    rows = []
    for row in rows_of(states):
        seconds, rate = row["predicted_iteration_time_s"], row["predicted_tokens_per_s"]
        numbers = _numbers(row, seconds, rate, row["predicted_efficiency"])
        rows.append((_run(name, row), *numbers, "predicted" if seconds is not None else "no prediction"))
    return list(_lines(_PREDICTED, rows))


def print_plot(rows: "Sequence[ScaleRow]", context: Context) -> None:
    """Tokens per second over nodes below the table, on a terminal."""
    if not is_for_people():
        return
    from llmctl.operate.scale.drawing import chart_of

    chart = chart_of(rows)
    if chart is None:
        return
    from llmctl.operate.plot.terminal import chart_text

    columns, lines = shutil.get_terminal_size()
    colour, unicode = not context.environment.get("NO_COLOR"), is_utf8(sys.stdout.encoding)
    print()
    print(chart_text(chart, columns, min(_PLOT_ROWS, lines - 2), colour=colour, unicode=unicode))


def _run(name: str, row: "ScaleRow") -> str:
    return f"{name}-{row['nodes']}n"


def _numbers(row: "ScaleRow", seconds: float | None, rate: float | None, share: float | None) -> tuple[str, ...]:
    return (
        f"{row['nodes']:,}",
        f"{row['devices']:,}",
        f"{row['global_batch_size']:,}",
        _seconds(seconds),
        _ABSENT if rate is None else rate_text(rate),
        _ABSENT if rate is None else rate_text(rate / row["devices"]),
        _ABSENT if share is None else f"{100 * share:.1f}%",
    )


def _seconds(seconds: float | None) -> str:
    return _ABSENT if seconds is None else f"{seconds:#.3g}".rstrip(".")


def _lines(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    # Rows are printed as they come: widths must not depend on numbers that are not known yet.
    sized = [max(8, len(word)) for word in heading]
    sized[0] = max(len(row[0]) for row in (heading, *rows))
    for row in (heading, *rows):
        cells = [
            cell.ljust(width) if word in _LEFT else cell.rjust(width)
            for cell, width, word in zip(row, sized, heading, strict=True)
        ]
        yield "  ".join(cells).rstrip()
