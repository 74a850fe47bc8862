"""The time of a run by kind, for each attempt: steps that count, and all that they cost. Pure.

ETTR is the effective training time ratio: the time of the steps that count over the time since the first start. The
supervisor's times are those of its host, the rows' times those of rank 0's: only differences on one host count, and a
difference between two hosts is cut to the time that is left.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from llmctl.runs.costs.attempt_files import AttemptFiles
from llmctl.runs.costs.save_interval import SaveAdvice
from llmctl.runs.facts import AttemptFacts
from llmctl.runs.record import Submission
from llmctl.runs.series.history import AttemptRows
from llmctl.runs.state import failure_cause

_QUIET_S = 60.0
"""A running attempt that has written no row for longer, and for longer than two steps, waits for something."""


@dataclass(frozen=True)
class TimeSplit:
    """Seconds by kind.

    Attributes:
        queue_s: from a submission to its first attempt.
        pause_s: between the end of an attempt and the next submission or attempt.
        start_s: from the start of an attempt to its first step.
        steps_s: of the steps that count, with evaluations between them; of a COMMAND, of its whole attempts.
        saves_s: for which the training stood because of a checkpoint.
        lost_steps_s: of the steps that a later attempt did again, or has to do again.
        hang_s: from the last step of a failed attempt until its failure was seen.
        end_s: from there, or from the last step, to the end of the attempt.
    """

    queue_s: float = 0.0
    pause_s: float = 0.0
    start_s: float = 0.0
    steps_s: float = 0.0
    saves_s: float = 0.0
    lost_steps_s: float = 0.0
    hang_s: float = 0.0
    end_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum."""
        return sum(float(getattr(self, each.name)) for each in fields(self))

    @property
    def lost_s(self) -> float:
        """All but steps that count and waiting in the queue."""
        return self.total_s - self.steps_s - self.queue_s


@dataclass(frozen=True)
class AttemptCost:
    """One attempt.

    Attributes:
        number: of the attempt.
        reason: of its end, as in exit.json; ``running``, or empty if no end was recorded.
        failure_class: kind of the failure; empty without one.
        cause: of the failure, as a sentence; empty without one.
        first_iteration: that the attempt trained; null without a row.
        last_iteration: that the attempt trained.
        lost_steps: that a later attempt did again, or has to do again.
        lost_s: seconds of this attempt, and of the pause before it, that are not of steps that count.
        time: of the attempt, and of the wait before it, by kind.
    """

    number: int
    reason: str
    failure_class: str
    cause: str
    first_iteration: int | None
    last_iteration: int | None
    lost_steps: int
    lost_s: float
    time: TimeSplit


@dataclass(frozen=True)
class RunCosts:
    """Costs of a run.

    Attributes:
        ettr: time of steps that count over the time since the first start, without queues; null without a step.
        ettr_with_queue: the same over all time since the submission.
        wall_s: seconds since the first start, without queues.
        lost_s: those that are not of steps that count.
        time: of all attempts by kind.
        attempts: in order.
        save: advice on checkpoint.save_interval; null while no save was measured.
    """

    ettr: float | None
    ettr_with_queue: float | None
    wall_s: float
    lost_s: float
    time: TimeSplit
    attempts: tuple[AttemptCost, ...]
    save: SaveAdvice | None = None


def split_time(
    run_id: str,
    attempts: Sequence[AttemptFiles],
    rows: Mapping[int, AttemptRows],
    submissions: Sequence[Submission],
    *,
    is_running: bool,
    is_training: bool = True,
) -> RunCosts:
    """Split the time of a run.

    Args:
        run_id: for the remedies in causes.
        attempts: of the run, in order.
        rows: number of an attempt -> its rows.
        submissions: of the run.
        is_running: the last attempt has not ended.
        is_training: False for a COMMAND, which has no steps.
    """
    submitted = {one.number: one.time for one in submissions}
    resumed_until = max((number for number in rows), default=0)
    costs: list[AttemptCost] = []
    before: float | None = None
    seen: set[int | None] = set()
    for attempt in attempts:
        of_attempt = rows.get(attempt.number)
        goes_on = is_running and attempt is attempts[-1] and attempt.ending is None
        lost = _lost_steps(attempt, of_attempt, is_resumed=attempt.number < resumed_until)
        span = _span(attempt, of_attempt)
        number = attempt.started.submission if attempt.started is not None else None
        sent = submitted.get(number) if number is not None and number not in seen else None
        seen.add(number)
        wait = _wait(span[0] if span is not None else None, sent, before)
        time = _split(attempt, of_attempt, wait, lost[1], goes_on=goes_on, is_training=is_training)
        before = span[1] if span is not None else before
        costs.append(_cost(run_id, attempt, of_attempt, lost[0], time, goes_on=goes_on))
    total = TimeSplit(*(sum(getattr(cost.time, each.name) for cost in costs) for each in fields(TimeSplit)))
    wall = total.total_s - total.queue_s
    has_steps = is_training and bool(rows) and wall > 0
    return RunCosts(
        total.steps_s / wall if has_steps else None,
        total.steps_s / total.total_s if has_steps else None,
        wall,
        total.lost_s,
        total,
        tuple(costs),
    )


def _cost(
    run_id: str, attempt: AttemptFiles, rows: AttemptRows | None, lost_steps: int, time: TimeSplit, *, goes_on: bool
) -> AttemptCost:
    ending = attempt.ending
    cause = ""
    if attempt.has_failed and not goes_on:
        facts = AttemptFacts(attempt.number, ending=ending, heartbeats=attempt.silent, errors=attempt.errors)
        cause = failure_cause(facts, run_id)
    return AttemptCost(
        attempt.number,
        "running" if goes_on else ending.reason if ending is not None else "",
        ending.failure_class if ending is not None else "",
        cause,
        rows.first_iteration if rows is not None else None,
        rows.last_iteration if rows is not None else None,
        lost_steps,
        time.lost_s,
        time,
    )


def _wait(began: float | None, submitted: float | None, before: float | None) -> TimeSplit:
    """Queue and pause before an attempt; ``submitted`` for the first one of a submission, ``before``: the last end."""
    if began is None:
        return TimeSplit()
    if submitted is None:
        return TimeSplit(pause_s=max(0.0, began - before)) if before is not None else TimeSplit()
    sent = min(began, submitted if before is None else max(before, submitted))
    return TimeSplit(queue_s=began - sent, pause_s=max(0.0, sent - before) if before is not None else 0.0)


def _lost_steps(attempt: AttemptFiles, rows: AttemptRows | None, *, is_resumed: bool) -> tuple[int, float]:
    """Steps lost and their time: as a later attempt has done them again, or else as the supervisor expects it."""
    if rows is not None and (is_resumed or rows.undone_iterations):
        return rows.undone_iterations, rows.undone_s
    steps = attempt.ending.lost_steps if attempt.ending is not None and attempt.has_failed else None
    if not steps or is_resumed:
        return 0, 0.0
    return steps, steps * rows.step_s if rows is not None else 0.0


def _span(attempt: AttemptFiles, rows: AttemptRows | None) -> tuple[float, float] | None:
    """Start and end of an attempt by the clock of its supervisor; without its end, that of the last row."""
    span = attempt.span
    if span is None or attempt.ending is not None or attempt.alive is not None or rows is None:
        return span
    return span if math.isnan(rows.end_time) else (span[0], max(span[0], rows.end_time))


def _split(
    attempt: AttemptFiles,
    rows: AttemptRows | None,
    wait: TimeSplit,
    lost_s: float,
    *,
    goes_on: bool,
    is_training: bool,
) -> TimeSplit:
    span = _span(attempt, rows)
    if span is None:
        return wait
    began, ended = span
    took, kinds = ended - began, {"queue_s": wait.queue_s, "pause_s": wait.pause_s}
    if not is_training:
        return TimeSplit(**kinds, steps_s=took)
    if rows is None or not math.isfinite(rows.end_time - rows.first_time):
        return TimeSplit(**kinds, start_s=took)
    # Rows are written at the end of their steps.
    trained = min(took, max(0.0, rows.end_time - rows.first_time + rows.first_s))
    start = min(max(0.0, rows.first_time - rows.first_s - began), took - trained)
    left = took - trained - start
    saves = min(sum(rows.blocked_s), trained)
    lost = min(lost_s, trained - saves)
    steps, hang = trained - saves - lost, _hang_s(attempt, ended, left)
    if goes_on:
        is_quiet = left > max(_QUIET_S, 2 * rows.step_s)
        steps, hang = (steps, left) if is_quiet else (steps + left, 0.0)
        left = hang
    return TimeSplit(
        **kinds, start_s=start, steps_s=steps, saves_s=saves, lost_steps_s=lost, hang_s=hang, end_s=left - hang
    )


def _hang_s(attempt: AttemptFiles, ended: float, left: float) -> float:
    """Of the seconds ``left`` after the last row, those until the failure was seen; 0 if another host saw it."""
    if attempt.ending is not None and attempt.ending.failure_class == "hang":
        return left
    if not attempt.has_failed or attempt.error is None or attempt.started is None:
        return 0.0
    host = (attempt.started.host or "").partition(".")[0]
    if attempt.error.host.partition(".")[0] != host:
        return 0.0
    return min(left, max(0.0, attempt.error.time - (ended - left)))
