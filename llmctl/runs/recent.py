"""The recent past of a run as few points, from the last rows of its metrics. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.runs.metrics import MetricsTable, Row, number

MAX_POINTS = 40
"""Points of one value: with its name and its numbers, a sparkline of them fits 80 columns."""


@dataclass(frozen=True)
class RecentMetrics:
    """Points of the last rows, in the order of training. A point stands for one row, or for as many rows as any other.

    Attributes:
        first_iteration: iteration of the oldest row.
        iteration: last iteration of each point.
        loss: mean lm_loss of each point; None where no row has a finite one.
        tokens_per_s: mean of each point; None likewise.
        peak_memory_bytes: largest of each point; None likewise.
    """

    first_iteration: int
    iteration: tuple[int, ...]
    loss: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    peak_memory_bytes: tuple[int | None, ...]


def recent_metrics(table: MetricsTable) -> RecentMetrics | None:
    """The points of the rows up to the newest one; None without a row.

    A resumed run repeats iterations: rows of an earlier attempt behind the newest row are not its past.
    """
    newest = table.newest
    if newest is None:
        return None
    rows = [table.train[iteration] for iteration in sorted(table.train) if iteration <= newest["iteration"]]
    size = -(-len(rows) // MAX_POINTS)
    # From the end, so that the newest point is a whole one.
    groups = [rows[max(0, end - size) : end] for end in range(len(rows), 0, -size)][::-1]
    return RecentMetrics(
        first_iteration=rows[0]["iteration"],
        iteration=tuple(group[-1]["iteration"] for group in groups),
        loss=tuple(_mean(group, "lm_loss") for group in groups),
        tokens_per_s=tuple(_mean(group, "tokens_per_s") for group in groups),
        peak_memory_bytes=tuple(max(map(int, _values(group, "peak_memory_bytes")), default=None) for group in groups),
    )


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = _values(rows, key)
    # Divided first: the sum of large values would overflow.
    return sum(value / len(values) for value in values) if values else None
