"""Start and end times of the actions of a table, from given durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.planning.schedule.placement import Placement, ScheduleError
from trainer.planning.schedule.table import Action, ActionKind, PipelineSchedule


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
    arrivals = _Arrivals(schedule.placement, latency)
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.stages]
    progress = True
    while progress:
        progress = False
        for rank, (row, done) in enumerate(zip(schedule.stages, times, strict=True)):
            free = done[-1][1] if done else 0.0
            # A rank works through its row until it needs a message that is not sent yet.
            while len(done) < len(row) and (arrived := arrivals.of(rank, row[len(done)])) is not None:
                action = row[len(done)]
                start = max(free, arrived)
                free = start + duration(rank, action)
                done.append((start, free))
                arrivals.send(rank, action, free)
                progress = True
    for rank, (row, done) in enumerate(zip(schedule.stages, times, strict=True)):
        if len(done) < len(row):
            raise ScheduleError(f"deadlock: rank {rank} never receives the message for {row[len(done)]}")
    return Timeline(tuple(tuple(done) for done in times))


class _Arrivals:
    """Times at which messages arrive, by direction, receiving virtual stage and micro-batch; see table.exchanges."""

    def __init__(self, placement: Placement, latency: float) -> None:
        self._placement, self._latency = placement, latency
        self._last = placement.num_virtual_stages - 1
        self._rank_of = [placement.place(stage)[0] for stage in range(self._last + 1)]
        self._forward: dict[tuple[int, int], float] = {}
        self._backward: dict[tuple[int, int], float] = {}

    def of(self, rank: int, action: Action) -> float | None:
        """Time at which the message for an action is there; 0 without a message, None before it is sent."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return 0.0
        stage = self._placement.virtual_stage(rank, action.chunk)
        if action.kind is ActionKind.FORWARD:
            return 0.0 if stage == 0 else self._forward.get((stage, action.micro_batch))
        return 0.0 if stage == self._last else self._backward.get((stage, action.micro_batch))

    def send(self, rank: int, action: Action, end: float) -> None:
        """Note the message of an action that has ended."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return
        is_forward = action.kind is ActionKind.FORWARD
        stage = self._placement.virtual_stage(rank, action.chunk) + (1 if is_forward else -1)
        if 0 <= stage <= self._last:
            sent = self._forward if is_forward else self._backward
            sent[stage, action.micro_batch] = end + (self._latency if self._rank_of[stage] != rank else 0.0)


def _lookup(schedule: PipelineSchedule, durations: Durations | Sequence[Durations]) -> DurationOf:
    def duration(rank: int, action: Action) -> float:
        stage = schedule.placement.virtual_stage(rank, action.chunk)
        of_kind = durations if isinstance(durations, Mapping) else durations[stage]
        if action.kind is ActionKind.BACKWARD and ActionKind.BACKWARD not in of_kind:
            return of_kind[ActionKind.BACKWARD_INPUT] + of_kind[ActionKind.BACKWARD_WEIGHT]
        return of_kind[action.kind]

    return duration
