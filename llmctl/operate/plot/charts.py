"""Charts of several runs: which lines each chart has, and their points. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmctl.runs.series.curves import Curve, Curves, RunCurves, run_curves
from llmctl.runs.series.history import RunHistory

Axis = Literal["iteration", "tokens", "time"]
AXES: tuple[Axis, ...] = ("iteration", "tokens", "time")
LOSS, VALIDATION = "lm_loss", "valid_loss"
_UNITS = ((2 * 86400.0, "days", 86400.0), (7200.0, "hours", 3600.0), (120.0, "minutes", 60.0), (0.0, "seconds", 1.0))
"""Shortest time in seconds for which a unit is taken, and the unit's own."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for the legend.
        run: number of the run, which has one colour in all charts.
        x: ascending.
        y: as many numbers as ``x``.
        low: smallest value that each point stands for; empty if every point is one row.
        high: largest; likewise.
        is_sparse: few points far apart, such as validations.
    """

    name: str
    run: int
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    is_sparse: bool = False


@dataclass(frozen=True)
class Chart:
    """A key over an axis. ``is_log``: its numbers are drawn on a logarithmic scale."""

    key: str
    x_label: str
    lines: list[Line]
    is_log: bool = False


def charts(
    histories: Mapping[str, RunHistory], keys: Sequence[str], axis: Axis, *, is_log: bool, most: int
) -> list[Chart]:
    """One chart per key, with a line for each run that has the key; none for a key that no run has.

    The chart of the loss has the validations too, unless they have a chart of their own.

    Args:
        histories: run name -> its metrics.
        keys: of metrics.jsonl.
        axis: what the x axis counts.
        is_log: leave out numbers that are not positive, for a logarithmic scale.
        most: largest number of points per line.
    """
    curves = {name: run_curves(history, most) for name, history in histories.items()}
    unit, unit_s = _unit(curves.values())
    label = f"{unit} since the first step" if axis == "time" else axis
    found = []
    for key in keys:
        with_validation = key == LOSS and VALIDATION not in keys
        lines = []
        for number, (name, of_run) in enumerate(curves.items()):
            start = _start(of_run.train)
            origin = (start, unit_s)
            line = curve_line(name, number, key, of_run.train, axis, origin)
            others = curve_line(name, number, key, of_run.valid, axis, origin)
            if with_validation:
                others = curve_line(f"{name}, validation", number, VALIDATION, of_run.valid, axis, origin)
            lines += [each for each in (line, others) if each is not None]
        if is_log:
            lines = [each for line in lines if (each := _positive(line)) is not None]
        if lines:
            # The few points of a validation are drawn over the lines.
            found.append(Chart(key, label, sorted(lines, key=lambda line: line.is_sparse), is_log))
    return found


def _start(train: Curves) -> float:
    return next((time for time in train.time if time is not None), 0.0)


def _unit(runs: Iterable[RunCurves]) -> tuple[str, float]:
    """Unit for the longest of the runs, and its seconds."""
    ends = [[time for time in run.train.time if time is not None] for run in runs]
    longest = max((times[-1] - times[0] for times in ends if times), default=0.0)
    return next((unit, seconds) for least, unit, seconds in _UNITS if longest >= least or not least)


def curve_line(
    name: str,
    run: int,
    key: str,
    curves: Curves,
    axis: Axis = "iteration",
    origin: tuple[float, float] = (0.0, 1.0),
) -> Line | None:
    """The line of one key; None if it has no point.

    Args:
        name: for the legend.
        run: number of the run, which has one colour in all charts.
        key: of metrics.jsonl.
        curves: of the run.
        axis: the x axis.
        origin: for the axis of time: its zero in seconds since 1970, and its unit in seconds.
    """
    curve = curves.of.get(key)
    if curve is None:
        return None
    places = _places(curves, axis, *origin)
    points = [number for number, place in enumerate(places) if place is not None and curve.mean[number] is not None]
    if not points:
        return None
    return Line(
        name,
        run,
        [_known(places, number) for number in points],
        [_known(curve.mean, number) for number in points],
        _envelope(curve, curve.low, points),
        _envelope(curve, curve.high, points),
        is_sparse=key.startswith("valid_"),
    )


def _places(curves: Curves, axis: Axis, start: float, unit_s: float) -> Sequence[float | None]:
    if axis == "iteration":
        return curves.iteration
    if axis == "tokens":
        return curves.tokens
    return [None if time is None else (time - start) / unit_s for time in curves.time]


def _envelope(curve: Curve, values: Sequence[float | None], points: Sequence[int]) -> list[float]:
    return [_known(values, number) for number in points] if curve.has_envelope else []


def _known(values: Sequence[float | None], number: int) -> float:
    value = values[number]
    assert value is not None
    return value


def _positive(line: Line) -> Line | None:
    """The points with positive numbers, of their envelope too; None without one."""
    lowest = line.low or line.y
    points = [number for number, value in enumerate(lowest) if value > 0]
    if not points:
        return None
    x, y, low, high = (
        [each[number] for number in points] if each else [] for each in (line.x, line.y, line.low, line.high)
    )
    return Line(line.name, line.run, x, y, low, high, line.is_sparse)
