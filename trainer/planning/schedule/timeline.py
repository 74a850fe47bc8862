"""When every action of a table starts and ends, from how long its kinds of action take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.planning.schedule.placement import ScheduleError
from trainer.planning.schedule.table import Action, ActionKind, Message, PipelineSchedule, exchanges


@dataclass(frozen=True)
class Timeline:
    """Times of the actions of a table, row by row, in the unit of the durations it was made from."""

    rows: tuple[tuple[tuple[float, float], ...], ...]
    """(start, end) of every action of every pipeline rank."""

    @property
    def step_time(self) -> float:
        """From the first action to the end of the last: what the table takes at best."""
        return max((row[-1][1] for row in self.rows if row), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they wait."""
        if not self.step_time:
            return 0.0
        busy = sum(end - start for row in self.rows for start, end in row)
        return 1 - busy / (len(self.rows) * self.step_time)

    def idle_time(self, rank: int) -> float:
        """How long a rank waits, before its first and after its last action included."""
        return self.step_time - sum(end - start for start, end in self.rows[rank])


Durations = Mapping[ActionKind, float]
"""How long each kind of action takes. BACKWARD may be left out: it is the sum of its two parts."""


DurationOf = Callable[[int, Action], float]
"""How long an action of a pipeline rank takes."""


def timeline(
    schedule: PipelineSchedule, durations: Durations | Sequence[Durations] | DurationOf, *, latency: float = 0.0
) -> Timeline:
    """Times of every action where each starts as soon as its rank is free and what it waits for has arrived.

    Args:
        schedule: any table.
        durations: of the actions in any virtual stage, or for each virtual stage its own, or of each single action.
        latency: from the end of an action until what it gives has arrived on another rank.

    Raises:
        ScheduleError: some action never gets what it waits for.
    """
    duration = durations if callable(durations) else _lookup(schedule, durations)
    rows = [exchanges(schedule, rank) for rank in range(len(schedule.stages))]
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    arrived: dict[Message, float] = {}
    progress = True
    while progress:
        progress = False
        for rank, (row, done) in enumerate(zip(rows, times, strict=True)):
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
            raise ScheduleError(f"deadlock: rank {rank} never gets what {row[len(done)].action} waits for")
    return Timeline(tuple(tuple(done) for done in times))


def _lookup(schedule: PipelineSchedule, durations: Durations | Sequence[Durations]) -> DurationOf:
    def duration(rank: int, action: Action) -> float:
        stage = schedule.placement.virtual_stage(rank, action.chunk)
        of_kind = durations if isinstance(durations, Mapping) else durations[stage]
        if action.kind is ActionKind.BACKWARD and ActionKind.BACKWARD not in of_kind:
            return of_kind[ActionKind.BACKWARD_INPUT] + of_kind[ActionKind.BACKWARD_WEIGHT]
        return of_kind[action.kind]

    return duration
