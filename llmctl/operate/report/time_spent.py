"""The time of a run by kind: steps that count, steps undone, starts, ends, and waiting. Pure."""

import math
from dataclasses import dataclass

from llmctl.operate.report.gather import Attempt, ReportedRun


@dataclass(frozen=True)
class TimePart:
    """Seconds of one kind.

    Attributes:
        kind: its class in the page.
        words: its name.
        seconds: of all attempts.
    """

    kind: str
    words: str
    seconds: float


def time_parts(run: ReportedRun) -> list[TimePart]:
    """Kinds of time with more than nothing, in the order of a bar.

    An attempt without an end counts until its last row. Rows have times of the ranks' clock, and starts and ends those
    of the supervisor's: the nodes of a cluster are expected to agree within a second.
    """
    queue = between = start = steps = undone = end = 0.0
    before: float | None = run.record.submissions[0].time if run.record.submissions else None
    for position, attempt in enumerate(run.attempts):
        began, ended = _span(run, attempt)
        if began is None:
            continue
        if before is not None:
            queue, between = (
                (queue + max(0.0, began - before), between)
                if position == 0
                else (queue, between + max(0.0, began - before))
            )
        before = ended if ended is not None else began
        rows = run.trained.get(attempt.number)
        if rows is None or not math.isfinite(rows.first_time):
            start += max(0.0, (ended or began) - began)
            continue
        # A row is written at the end of its step.
        first = max(began, rows.first_time - _step_s(run, attempt))
        start += first - began
        steps += max(0.0, rows.last_time - first - rows.undone_s)
        undone += rows.undone_s
        if ended is not None:
            end += max(0.0, ended - rows.last_time)
    parts = [
        TimePart("queue", "before the first attempt", queue),
        TimePart("start", "start of attempts", start),
        TimePart("steps", "steps that count", steps),
        TimePart("undone", "steps done in vain", undone),
        TimePart("end", "end of attempts", end),
        TimePart("between", "between attempts", between),
    ]
    return [part for part in parts if part.seconds >= 0.5]


def _span(run: ReportedRun, attempt: Attempt) -> tuple[float | None, float | None]:
    began = attempt.started.time if attempt.started is not None else None
    if attempt.ending is not None and attempt.ending.time is not None:
        return began, attempt.ending.time
    rows = run.trained.get(attempt.number)
    return began, rows.last_time if rows is not None and math.isfinite(rows.last_time) else None


def _step_s(run: ReportedRun, attempt: Attempt) -> float:
    """Time of the attempt's first step, by its steps' mean."""
    rows = run.trained[attempt.number]
    steps = rows.last_iteration - rows.first_iteration
    return (rows.last_time - rows.first_time) / steps if steps > 0 else 0.0
