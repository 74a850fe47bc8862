"""The rows of a run that count, and the steps that were done in vain. Pure.

A resumed run goes back to its checkpoint. All steps behind that were undone, and their rows are dropped at the first
row that steps back, also those that the run never does again. A row of an attempt that had lost the run to another does
not count, as in ``llmctl.runs.metrics``.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from operator import lt

from llmctl.runs.series.columns import NO_TOKEN, Columns


@dataclass
class AttemptRows:
    """One attempt by its rows of training. Times in seconds since 1970, NaN where a row has none.

    Attributes:
        number: of the attempt.
        first_iteration: of the first row.
        last_iteration: of the last row.
        first_time: time of the first row.
        last_time: time of the last row.
        undone_iterations: number of its iterations that a later attempt went back behind.
        undone_s: time of these iterations.
        first_s: time of the iterations that the first row stands for.
        end_time: time of its last row of any kind.
        blocked_s: of each save, the time for which the training stood.
        written_s: of each save, the time until it was complete.
    """

    number: int
    first_iteration: int
    last_iteration: int
    first_time: float
    last_time: float
    undone_iterations: int = 0
    undone_s: float = 0.0
    first_s: float = 0.0
    end_time: float = math.nan
    blocked_s: list[float] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Mean time of an iteration, with all that is between two of them."""
        steps = self.last_iteration - self.first_iteration
        return (self.last_time - self.first_time) / steps if steps > 0 else self.first_s

    def note_time(self, time: float) -> None:
        """Take the time of a row, which may be NaN."""
        if math.isfinite(time):
            self.end_time = max(time, self.end_time) if math.isfinite(self.end_time) else time


@dataclass
class RunHistory:
    """The rows that count, in ascending order of iteration, and the attempts that wrote rows."""

    rows: Columns = field(default_factory=Columns)
    attempts: dict[int, AttemptRows] = field(default_factory=dict)
    _token: int = 0

    def add(self, chunk: Columns) -> None:
        """Add rows in the order of writing."""
        self._add_steps(chunk)
        for row in chunk.others:
            attempt = self.attempts.get(row.attempt)
            if attempt is not None:
                attempt.note_time(row.time)
            if attempt is not None and row.blocked_s is not None and row.written_s is not None:
                attempt.blocked_s.append(row.blocked_s)
                attempt.written_s.append(row.written_s)

    def _add_steps(self, chunk: Columns) -> None:
        last, last_is_valid = self._last()
        if self._goes_on(chunk, last):
            self._take(chunk, 0, len(chunk))
            return
        begin = 0
        attempt = chunk.attempt[0] if len(chunk) else 0
        of_rows = zip(chunk.iteration, chunk.attempt, chunk.token, chunk.is_valid, strict=True)
        for position, (iteration, number, token, is_valid) in enumerate(of_rows):
            if 0 <= token < self._token:
                self._take(chunk, begin, position)
                begin = position + 1
                continue
            self._token = max(self._token, token)
            if number != attempt:
                self._take(chunk, begin, position)
                begin, attempt = position, number
            if not (iteration > last or (iteration == last and is_valid and not last_is_valid)):
                self._take(chunk, begin, position)
                begin = position
                self._step_back(iteration, is_valid=bool(is_valid))
            last, last_is_valid = iteration, is_valid
        self._take(chunk, begin, len(chunk))

    def _goes_on(self, chunk: Columns, last: int) -> bool:
        """True for steps of one attempt in their order, as nearly all chunks are; ``add`` would find the same."""
        steps, count = chunk.iteration, len(chunk)
        is_one = count > 0 and chunk.attempt.count(chunk.attempt[0]) == count
        has_token = is_one and chunk.token[0] in (self._token, NO_TOKEN) and chunk.token.count(chunk.token[0]) == count
        return has_token and steps[0] > last and 1 not in chunk.is_valid and all(map(lt, steps, steps[1:]))

    def _last(self) -> tuple[int, int]:
        return (self.rows.iteration[-1], self.rows.is_valid[-1]) if len(self.rows) else (-1, 0)

    def _take(self, chunk: Columns, begin: int, end: int) -> None:
        """Append rows of one attempt."""
        if begin >= end:
            return
        before = self.rows.iteration[-1] if len(self.rows) else 0
        self.rows.extend(chunk, begin, end)
        self._note_steps(chunk, begin, end, before)
        known, times = self.attempts.get(chunk.attempt[begin]), chunk.values.get("time")
        if known is not None and times is not None:
            known.note_time(times[end - 1])

    def _note_steps(self, chunk: Columns, begin: int, end: int, before: int) -> None:
        first, last = chunk.is_valid.find(0, begin, end), chunk.is_valid.rfind(0, begin, end)
        if first < 0:
            return
        times = chunk.values.get("time")
        first_time, last_time = (times[first], times[last]) if times is not None else (math.nan, math.nan)
        number = chunk.attempt[begin]
        known = self.attempts.get(number)
        if known is None:
            span = chunk.iteration[first], chunk.iteration[last]
            known = self.attempts[number] = AttemptRows(number, *span, first_time, last_time)
            seconds = chunk.values.get("iteration_time_s")
            took = seconds[first] if seconds is not None else math.nan
            # A row stands for all iterations since the row before it. Of a run that began elsewhere, that is unknown.
            following = chunk.is_valid.find(0, first + 1, end)
            steps = span[0] - before if before else 1
            if following >= 0:
                steps = min(span[0] - before, chunk.iteration[following] - span[0])
            known.first_s = max(1, steps) * took if math.isfinite(took) else 0.0
        else:
            known.last_iteration, known.last_time = chunk.iteration[last], last_time

    def _step_back(self, iteration: int, *, is_valid: bool) -> None:
        """Drop what a row of ``iteration`` undoes: that step and all later ones; of a validation, only later steps."""
        rows = self.rows
        position = bisect_left(rows.iteration, iteration)
        if is_valid:
            position = bisect_right(rows.iteration, iteration)
            if position and rows.is_valid[position - 1] and rows.iteration[position - 1] == iteration:
                position -= 1
        seconds = rows.values.get("iteration_time_s")
        for row in range(position, len(rows)):
            attempt = self.attempts.get(rows.attempt[row])
            if attempt is None or rows.is_valid[row]:
                continue
            # A row stands for all iterations since the row before it.
            steps = rows.iteration[row] - rows.iteration[row - 1] if row else rows.iteration[row]
            took = seconds[row] if seconds is not None else math.nan
            attempt.undone_iterations += steps
            attempt.undone_s += steps * took if math.isfinite(took) else 0.0
        rows.cut(position)
