"""Start and end times of the actions of a table, from given durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.planning.schedule.placement import ScheduleError
from trainer.planning.schedule.table import Action, ActionKind, Message, PipelineSchedule, exchanges


@dataclass(frozen=True)
class Timeline:
    """Times of a table's actions, row by row, in the durations' unit."""

    rows: tuple[tuple[tuple[float, float], ...], ...]
    """(start, end) of every action of every pipeline rank."""

    @property
    def step_time(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max((row[-1][1] for row in self.rows if row), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time spent waiting."""
        if not self.step_time:
            return 0.0
        busy = sum(end - start for row in self.rows for start, end in row)
        return 1 - busy / (len(self.rows) * self.step_time)

    def idle_time(self, rank: int) -> float:
        """Time that a rank waits, including before its first and after its last action."""
        return self.step_time - sum(end - start for start, end in self.rows[rank])


Durations = Mapping[ActionKind, float]
"""Duration of each kind of action. BACKWARD may be left out; it is the sum of its two parts."""


DurationOf = Callable[[int, Action], float]
"""Function from a pipeline rank and an action to the duration."""


def timeline(
    schedule: PipelineSchedule, durations: Durations | Sequence[Durations] | DurationOf, *, latency: float = 0.0
) -> Timeline:
    """Times of all actions, each starting as early as rank and message allow.

    Args:
        schedule: any table.
        durations: durations for all virtual stages, or a sequence with one mapping per virtual stage, or a function.
        latency: time from the end of an action until its message arrives on another rank.

    Raises:
        ScheduleError: an action never receives its message.
    """
    duration = durations if callable(durations) else _lookup(schedule, durations)
    rows = [exchanges(schedule, rank) for rank in range(len(schedule.stages))]
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    arrived: dict[Message, float] = {}
    progress = True
    while progress:
        progress = False
        for rank, (row, done) in enumerate(zip(rows, times, strict=True)):
            # A rank works through its row until it needs a message that is not sent yet.
            while len(done) < len(row) and (row[len(done)].receive is None or row[len(done)].receive in arrived):
                exchange, free = row[len(done)], done[-1][1] if done else 0.0
                start = max(free, arrived[exchange.receive] if exchange.receive else 0.0)
                end = start + duration(rank, exchange.action)
                done.append((start, end))
                if exchange.send is not None:
                    arrived[exchange.send] = end + (0.0 if exchange.send.is_local else latency)
                progress = True
    for rank, (row, done) in enumerate(zip(rows, times, strict=True)):
        if len(done) < len(row):
            raise ScheduleError(f"deadlock: rank {rank} never receives the message for {row[len(done)].action}")
    return Timeline(tuple(tuple(done) for done in times))


def _lookup(schedule: PipelineSchedule, durations: Durations | Sequence[Durations]) -> DurationOf:
    def duration(rank: int, action: Action) -> float:
        stage = schedule.placement.virtual_stage(rank, action.chunk)
        of_kind = durations if isinstance(durations, Mapping) else durations[stage]
        if action.kind is ActionKind.BACKWARD and ActionKind.BACKWARD not in of_kind:
            return of_kind[ActionKind.BACKWARD_INPUT] + of_kind[ActionKind.BACKWARD_WEIGHT]
        return of_kind[action.kind]

    return duration
