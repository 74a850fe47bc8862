"""A history as curves of few points. Pure.

A point stands for equally many rows: their mean, and beside it their smallest and largest value, so that a spike of one
step stays visible.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.runs.series.columns import Columns
from llmctl.runs.series.history import RunHistory

_AXES = ("consumed_tokens", "time")
MOST_POINTS = 1000
"""Points of a curve: as many as a wide screen has columns for a chart."""


@dataclass(frozen=True)
class Curve:
    """One key: a number per point, None where no row of the point has a finite one.

    Attributes:
        mean: of the point's rows.
        low: the smallest; the same list as ``mean`` if every point is one row.
        high: the largest; likewise.
    """

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]

    @property
    def has_envelope(self) -> bool:
        """True if a point stands for several rows."""
        return self.low is not self.mean


@dataclass(frozen=True)
class Curves:
    """Curves over the same points.

    Attributes:
        iteration: last iteration of each point.
        tokens: consumed_tokens of that iteration; None where unknown.
        time: of that row, seconds since 1970; None where unknown.
        of: key -> curve, but for the keys of axes; keys without a number are absent.
        rows: number of rows that the points stand for.
    """

    iteration: list[int]
    tokens: list[float | None]
    time: list[float | None]
    of: dict[str, Curve]
    rows: int


@dataclass(frozen=True)
class RunCurves:
    """Curves of the training, and of the validations."""

    train: Curves
    valid: Curves


def run_curves(history: RunHistory, most: int = MOST_POINTS) -> RunCurves:
    """The curves of a run, of at most ``most`` points each."""
    rows = history.rows
    if not any(rows.is_valid):
        return RunCurves(_curves(rows, most), _curves(Columns(), most))
    train = rows.of_training()
    valid = rows.of_validation()
    # A validation is written after its step, and has no count of tokens of its own.
    tokens = dict(zip(train.iteration, train.values.get("consumed_tokens", ()), strict=False))
    valid.values["consumed_tokens"] = array("d", [tokens.get(step, math.nan) for step in valid.iteration])
    return RunCurves(_curves(train, most), _curves(valid, most))


def _curves(rows: Columns, most: int) -> Curves:
    count = len(rows)
    size = max(1, -(-count // most))
    # From the end, so that the newest point is a whole one.
    ends = list(range(count, 0, -size))[::-1]
    spans = [(max(0, end - size), end) for end in ends]
    drawn = {key: column for key, column in rows.values.items() if key not in _AXES}
    curves = {key: curve for key, column in drawn.items() if (curve := _curve(column, spans, size)) is not None}
    return Curves(
        iteration=[rows.iteration[end - 1] for end in ends],
        tokens=_at(rows.values.get("consumed_tokens"), ends),
        time=_at(rows.values.get("time"), ends),
        of=curves,
        rows=count,
    )


def _at(column: "array[float] | None", ends: Sequence[int]) -> list[float | None]:
    if column is None:
        return [None] * len(ends)
    return [value if math.isfinite(value := column[end - 1]) else None for end in ends]


def _curve(column: "array[float]", spans: Sequence[tuple[int, int]], size: int) -> Curve | None:
    mean: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for begin, end in spans:
        part = column[begin:end].tolist()
        total = sum(part)
        if not math.isfinite(total):
            part = [value for value in part if math.isfinite(value)]
            # Divided first: the sum of large values would overflow.
            total = sum(value / len(part) for value in part) * len(part)
        mean.append(_mean(part, total))
        if size > 1:
            low.append(min(part, default=None))
            high.append(max(part, default=None))
    if all(value is None for value in mean):
        return None
    return Curve(mean, low, high) if size > 1 else Curve(mean, mean, mean)


def _mean(part: Sequence[float], total: float) -> float | None:
    if not part:
        return None
    mean = total / len(part)
    return mean if math.isfinite(mean) else max(part)
