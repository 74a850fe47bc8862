"""Time of a step and memory of a run in the middle of its training. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from llmctl.runs.series.columns import Columns
from llmctl.runs.series.history import RunHistory

KEYS = ("iteration_time_s", "peak_memory_bytes")
"""Keys of metrics.jsonl to read for it."""
FIRST_ROWS = 3
"""Rows of an attempt that are left out: compilers, caches and allocators are not ready yet."""
LEAST_ROWS = 3
"""Rows that have to remain."""


@dataclass(frozen=True)
class SteadyStep:
    """A run in the middle of its training.

    Attributes:
        seconds: median time of a step.
        bytes: highest peak memory of a rank; None: no row has it.
        rows: number of rows behind the median.
    """

    seconds: float
    bytes: int | None
    rows: int


def steady_step(history: RunHistory) -> SteadyStep | None:
    """The middle of a run; None: it has too few rows of training."""
    rows = history.rows.of_training()
    times = list(_steady_times(rows))
    if len(times) < LEAST_ROWS:
        return None
    peaks = [peak for peak in rows.values.get("peak_memory_bytes", ()) if math.isfinite(peak)]
    return SteadyStep(median(times), int(max(peaks)) if peaks else None, len(times))


def _steady_times(rows: Columns) -> Iterator[float]:
    seen = attempt = -1
    for number, time in zip(rows.attempt, rows.values.get("iteration_time_s", ()), strict=False):
        seen, attempt = (seen + 1, attempt) if number == attempt else (0, number)
        if seen >= FIRST_ROWS and math.isfinite(time):
            yield time
