"""The charts of the page: the numbers that the browser draws, and a table of each chart that says the same. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmctl.operate.report.gather import ReportedRun
from llmctl.runs.number_text import loss_text, memory_text, rate_text
from llmctl.runs.series.columns import ALWAYS
from llmctl.runs.series.curves import Curve, Curves

_DIGITS = 5
"""Significant digits of a drawn number: a screen has four."""


def _share_text(value: float) -> str:
    return f"{100 * value:.1f}%"


def _plain_text(value: float) -> str:
    return f"{value:.4g}"


@dataclass(frozen=True)
class ChartKind:
    """One chart of the page.

    Attributes:
        key: of the rows of training.
        title: heading.
        note: a line below the heading; may be empty.
        form: name of the numbers' form in page.js.
        text: the numbers as text.
        valid_key: key of the rows of validation, drawn as points; empty: none.
    """

    key: str
    title: str
    note: str
    form: str
    text: Callable[[float], str]
    valid_key: str = ""


CHARTS = (
    ChartKind("lm_loss", "Loss", "Nats per token. Points are validations.", "loss", loss_text, "valid_loss"),
    ChartKind("grad_norm", "Gradient norm", "Of the whole model, before clipping.", "plain", _plain_text),
    ChartKind("params_norm", "Parameter norm", "Of all parameters, after the step.", "plain", _plain_text),
    ChartKind("learning_rate", "Learning rate", "", "power", _plain_text),
    ChartKind("tokens_per_s", "Tokens per second", "Of all ranks.", "rate", rate_text),
    ChartKind("mfu", "Model FLOPs utilisation", "Share of the device's dense 16-bit peak.", "share", _share_text),
    ChartKind(
        "peak_memory_bytes",
        "Peak memory",
        "The largest of any rank: allocated on a GPU, resident on a CPU.",
        "bytes",
        memory_text,
    ),
)
_DRAWN = {chart.key for chart in CHARTS} | {chart.valid_key for chart in CHARTS}


def charts_of(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """The charts that have numbers, each with its table: a row for each run that has them."""
    kinds = [*CHARTS, *_further_losses(runs)]
    found = []
    for kind in kinds:
        rows = []
        for number, run in enumerate(runs):
            parts = (kind.key, run.curves.train, ""), (kind.valid_key, run.curves.valid, "validation")
            for key, part, word in parts:
                if key in part.of:
                    rows.append({"run": number, "name": run.record.run_id, "part": word, **_ends(kind, part, key)})
        if rows:
            chart = {"key": kind.key, "valid": kind.valid_key, "form": kind.form}
            found.append({**chart, "title": kind.title, "note": kind.note, "rows": rows})
    return found


def chart_data(runs: Sequence[ReportedRun], charts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of the charts, for page.js."""
    keys = {chart["key"] for chart in charts}, {chart["valid"] for chart in charts}
    drawn = []
    for run in runs:
        begun = _beginning(run)
        both = run.curves.train, run.curves.valid
        parts = [_part(part, wanted, begun) for part, wanted in zip(both, keys, strict=True)]
        drawn.append({"name": run.record.run_id, "train": parts[0], "valid": parts[1]})
    return {
        "runs": drawn,
        "charts": [{key: chart[key] for key in ("key", "valid", "form", "title")} for chart in charts],
    }


def _further_losses(runs: Sequence[ReportedRun]) -> list[ChartKind]:
    """Charts of the losses besides that of the next token, such as those of multi-token prediction."""
    keys = {key for run in runs for key in run.curves.train.of if key.endswith("_loss")} - _DRAWN - set(ALWAYS)
    return [
        ChartKind(key, key.replace("_", " ").capitalize(), "", "loss", loss_text, f"valid_{key}")
        for key in sorted(keys)
    ]


def _ends(kind: ChartKind, part: Curves, key: str) -> dict[str, str]:
    """First, last, smallest and largest number of a curve as text, with their iterations."""
    curve = part.of[key]
    means = [(step, value) for step, value in zip(part.iteration, curve.mean, strict=True) if value is not None]
    lows = [(value, step) for value, step in zip(curve.low, part.iteration, strict=True) if value is not None]
    highs = [(value, step) for value, step in zip(curve.high, part.iteration, strict=True) if value is not None]
    (low, low_step), (high, high_step) = min(lows), max(highs)
    # A point of many rows ends at its iteration: the extreme is not after that.
    about = "by " if curve.has_envelope else "at "
    return {
        "first": kind.text(means[0][1]),
        "last": kind.text(means[-1][1]),
        "low": kind.text(low),
        "low_at": f"{about}{low_step:,}",
        "high": kind.text(high),
        "high_at": f"{about}{high_step:,}",
    }


def _beginning(run: ReportedRun) -> float | None:
    """Start of the first attempt, from which time counts; without one, the first row."""
    starts = [one.started.time for one in run.attempts if one.started is not None and one.started.time is not None]
    rows = [time for part in (run.curves.train, run.curves.valid) for time in part.time if time is not None]
    return min(starts, default=None) if starts else min(rows, default=None)


def _part(part: Curves, wanted: set[str], begun: float | None) -> dict[str, Any]:
    time = [None if when is None or begun is None else round(max(0.0, when - begun), 1) for when in part.time]
    return {
        "step": part.iteration,
        "tokens": [None if count is None else int(count) for count in part.tokens],
        "time": time,
        "of": {key: _numbers(curve) for key, curve in part.of.items() if key in wanted},
    }


def _numbers(curve: Curve) -> list[list[float | int | None]]:
    lists = (curve.mean, curve.low, curve.high) if curve.has_envelope else (curve.mean,)
    return [[_short(value) for value in values] for values in lists]


def _short(value: float | None) -> float | int | None:
    """The number with few digits; a whole one without a decimal point, which takes less room."""
    if value is None:
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded if math.isfinite(rounded) else None
