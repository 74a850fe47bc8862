"""The calls of a messenger, run in simulation: whether all messages meet, and how long that takes.

A message passes when its send and its receive have both been posted: nothing is counted on that a backend may buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from trainer.pipeline.schedule.table import ActionKind, Message, PipelineSchedule, ScheduleError, exchanges
from trainer.pipeline.schedule.traffic import receive_of, receives_as_needed, receives_as_sent, send_of

FEWEST_SENDS_UNDER_WAY = 2
_TICKS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.BACKWARD_INPUT: 1, ActionKind.BACKWARD_WEIGHT: 1}


class Verb(Enum):
    """What a rank does."""

    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"
    COMPUTE = "compute"


@dataclass(frozen=True)
class Call:
    """Post a send or a receive, which returns at once; wait until a message has passed; or compute."""

    verb: Verb
    message: Message | None = None
    ticks: int = 0


def batched_program(schedule: PipelineSchedule, rank: int) -> list[Call]:
    """All that lies between two actions posted as one batch, which is then waited for."""
    row = exchanges(schedule, rank)
    calls: list[Call] = []
    for step, exchange in enumerate(row):
        send = send_of(row[step - 1]) if step else None
        calls += [*_batch(send, receive_of(exchange)), _compute(exchange.action.kind)]
    return [*calls, *_batch(send_of(row[-1]) if row else None, None)]


def _batch(send: Message | None, receive: Message | None) -> list[Call]:
    return [*_calls(Verb.SEND, [send]), *_calls(Verb.RECEIVE, [receive]), *_calls(Verb.WAIT, [send, receive])]


def tagged_program(schedule: PipelineSchedule, rank: int, *, sends_under_way: int | None) -> list[Call]:
    """Single sends and receives with tags; ``sends_under_way`` of them at most, or any number."""
    row = exchanges(schedule, rank)
    calls: list[Call] = []
    leaving: list[Message] = []
    for exchange, receives in zip(row, receives_as_needed(row), strict=True):
        calls += _calls(Verb.RECEIVE, receives)
        while sends_under_way is not None and len(leaving) > sends_under_way:
            calls += _calls(Verb.WAIT, [leaving.pop(0)])
        calls += [*_calls(Verb.WAIT, [receive_of(exchange)]), _compute(exchange.action.kind)]
        if (send := send_of(exchange)) is not None:
            calls += _calls(Verb.SEND, [send])
            leaving.append(send)
    return [*calls, *_calls(Verb.WAIT, leaving)]


def ordered_program(schedule: PipelineSchedule, rank: int) -> list[Call]:
    """Single sends and receives that meet in the order they are posted, each direction between two ranks by itself."""
    row = exchanges(schedule, rank)
    calls: list[Call] = []
    for exchange, receives in zip(row, receives_as_sent(schedule, rank), strict=True):
        calls += [*_calls(Verb.RECEIVE, receives), *_calls(Verb.WAIT, [receive_of(exchange)])]
        calls += [_compute(exchange.action.kind), *_calls(Verb.SEND, [send_of(exchange)])]
    return [*calls, *_calls(Verb.WAIT, map(send_of, row))]


def _calls(verb: Verb, messages: Iterable[Message | None]) -> list[Call]:
    return [Call(verb, message) for message in messages if message is not None]


def _compute(kind: ActionKind) -> Call:
    return Call(Verb.COMPUTE, ticks=_TICKS[kind])


def sends_under_way(schedule: PipelineSchedule) -> int:
    """How many sends with tags a rank should have under way at one time: the fewest with which nobody waits for them.

    Each of them keeps a stage's output in memory. They also bound how far a rank runs ahead where no answer comes back,
    as in evaluation.
    """

    def time(most: int | None) -> float:
        programs = [tagged_program(schedule, rank, sends_under_way=most) for rank in range(len(schedule.stages))]
        try:
            return run_programs(programs, in_order=False)
        except ScheduleError:
            return float("inf")

    best, most = time(None), FEWEST_SENDS_UNDER_WAY
    while time(most) > best:
        most += 1
    return most


def run_programs(programs: Sequence[Sequence[Call]], *, in_order: bool) -> float:
    """Run what every rank calls until all are done; returns the ticks that takes.

    Args:
        programs: the calls of each rank.
        in_order: the first send from one rank to another meets the first receive there, whatever each is meant for;
            otherwise tags tell messages apart.

    Raises:
        ScheduleError: some rank waits for ever, or a message is taken for another.
    """
    posted = _Posted(in_order)
    steps, clocks = [0] * len(programs), [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while steps[rank] < len(program):
                time = posted.call(program[steps[rank]], clocks[rank])
                if time is None:
                    break
                clocks[rank] = time
                steps[rank] += 1
                progress = True
    for rank, program in enumerate(programs):
        if steps[rank] < len(program):
            raise ScheduleError(f"deadlock: rank {rank} waits for ever for {program[steps[rank]].message}")
    return max(clocks, default=0)


class _Posted:
    """Sends and receives that have been posted, and when they met."""

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self._lists: dict[tuple[Verb, int, int], list[tuple[Message, int]]] = defaultdict(list)
        self._number: dict[tuple[Verb, Message], int] = {}

    def call(self, call: Call, clock: int) -> int | None:
        """When the caller can go on; None as long as that is not known."""
        if call.message is None:
            return clock + call.ticks
        if call.verb is Verb.WAIT:
            passed = self._passed(call.message)
            return None if passed is None else max(clock, passed)
        posted = self._lists[call.verb, call.message.source, call.message.destination]
        self._number[call.verb, call.message] = len(posted)
        posted.append((call.message, clock))
        return clock

    def _passed(self, message: Message) -> int | None:
        """When a message passed."""
        numbers = [self._number.get((verb, message)) for verb in (Verb.SEND, Verb.RECEIVE)]
        if self._in_order:
            ours = [number for number in numbers if number is not None]
            numbers = [ours[0], ours[0]]
        lists = [self._lists[verb, message.source, message.destination] for verb in (Verb.SEND, Verb.RECEIVE)]
        met = [posted[n] for posted, n in zip(lists, numbers, strict=True) if n is not None and n < len(posted)]
        if len(met) < 2:
            return None
        if met[0][0] != met[1][0]:
            raise ScheduleError(f"{met[0][0]} is sent where {met[1][0]} is received")
        return max(time for _, time in met)
