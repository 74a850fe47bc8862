"""Simulation of point-to-point messages: deadlocks, mismatches and step time.

A message is transferred when its send and its receive have both been posted: no buffering by the backend is assumed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from trainer.planning.schedule.placement import ScheduleError
from trainer.planning.schedule.table import ActionKind, Exchange, Message, PipelineSchedule, exchanges
from trainer.planning.schedule.timeline import timeline
from trainer.planning.schedule.traffic import TICKS, posts_in_order, receive_of, receives_as_needed, send_of

FEWEST_SENDS_UNDER_WAY = 2


class Verb(Enum):
    """Kind of call."""

    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"
    COMPUTE = "compute"


@dataclass(frozen=True)
class Call:
    """One call of a rank: non-blocking send or receive, wait, or computation."""

    verb: Verb
    message: Message | None = None
    ticks: int = 0


def batched_program(schedule: PipelineSchedule, rank: int) -> list[Call]:
    """Calls of a rank that batches the messages between two actions and waits."""
    row = exchanges(schedule, rank)
    calls: list[Call] = []
    for step, exchange in enumerate(row):
        send = send_of(row[step - 1]) if step else None
        calls += [*_batch(send, receive_of(exchange)), _compute(exchange.action.kind)]
    return [*calls, *_batch(send_of(row[-1]) if row else None, None)]


def _batch(send: Message | None, receive: Message | None) -> list[Call]:
    return [*_calls(Verb.SEND, [send]), *_calls(Verb.RECEIVE, [receive]), *_calls(Verb.WAIT, [send, receive])]


def tagged_program(schedule: PipelineSchedule, rank: int, *, sends_under_way: int | None) -> list[Call]:
    """Calls of a rank with tagged messages and at most ``sends_under_way`` pending sends.

    None: no limit.
    """
    row = exchanges(schedule, rank)
    calls: list[Call] = []
    leaving: deque[Message] = deque()
    for exchange, receives in zip(row, receives_as_needed(row), strict=True):
        calls += _calls(Verb.RECEIVE, receives)
        while sends_under_way is not None and len(leaving) > sends_under_way:
            calls += _calls(Verb.WAIT, [leaving.popleft()])
        calls += [*_calls(Verb.WAIT, [receive_of(exchange)]), _compute(exchange.action.kind)]
        if (send := send_of(exchange)) is not None:
            calls += _calls(Verb.SEND, [send])
            leaving.append(send)
    return [*calls, *_calls(Verb.WAIT, leaving)]


def ordered_programs(schedule: PipelineSchedule) -> list[list[Call]]:
    """Calls of all ranks with untagged messages, in the order of posts_in_order.

    Ranks only wait for receives.
    """
    programs: list[list[Call]] = []
    for rank, plan in enumerate(posts_in_order(schedule)):
        row = exchanges(schedule, rank)
        calls: list[Call] = []
        for posts, exchange in zip(plan, [*row, None], strict=True):
            for message in posts:
                calls += _calls(Verb.SEND if message.source == rank else Verb.RECEIVE, [message])
            if exchange is not None:
                calls += [*_calls(Verb.WAIT, [receive_of(exchange)]), _compute(exchange.action.kind)]
        programs.append([*calls, *_calls(Verb.WAIT, map(send_of, row))])
    return programs


def _calls(verb: Verb, messages: Iterable[Message | None]) -> list[Call]:
    return [Call(verb, message) for message in messages if message is not None]


def _compute(kind: ActionKind) -> Call:
    return Call(Verb.COMPUTE, ticks=TICKS[kind])


@lru_cache(maxsize=32)
def sends_under_way(schedule: PipelineSchedule) -> int:
    """Fewest pending tagged sends per rank with which no rank waits for a send.

    Each pending send keeps a stage's output in memory. The limit also bounds how far a rank runs ahead without any
    message back, as in evaluation. The number is computed from the timeline: a search by simulation would take minutes
    for a large table.
    """
    times = timeline(schedule, TICKS).rows
    rows = [exchanges(schedule, rank) for rank in range(len(schedule.stages))]
    # A receive is posted when the previous action ends; a message posted at both ends is transferred.
    posted = {
        message: spans[step - 1][1] if step else 0.0
        for row, spans in zip(rows, times, strict=True)
        for step, messages in enumerate(receives_as_needed(row))
        for message in messages
    }
    return max(
        FEWEST_SENDS_UNDER_WAY, *(_most_under_way(row, spans, posted) for row, spans in zip(rows, times, strict=True))
    )


def _most_under_way(
    row: Sequence[Exchange], spans: Sequence[tuple[float, float]], posted: Mapping[Message, float]
) -> int:
    """Largest number of untransferred sends at the start of an action."""
    most = 0
    passed: deque[float] = deque()
    for exchange, (start, end) in zip(row, spans, strict=True):
        while passed and passed[0] <= start:
            passed.popleft()
        most = max(most, len(passed))
        if (send := send_of(exchange)) is not None:
            passed.append(max(end, posted[send]))
    return most


class Meeting(Enum):
    """Rule for matching sends with receives."""

    BY_TAG = "every send matches its own receive"
    BY_PAIR = "the first send from one rank to another matches the first receive there, of any message"
    BY_STREAM = "as by pair, and the messages of a rank in one direction are transferred in the order of posting"


def run_programs(programs: Sequence[Sequence[Call]], meeting: Meeting) -> float:
    """Run the calls of all ranks, and return the number of ticks.

    Args:
        programs: the calls of each rank.
        meeting: the matching rule. There are two directions: to higher and to lower ranks.

    Raises:
        ScheduleError: a rank waits forever, or a send is matched with another message's receive.
    """
    posted = _Posted(meeting)
    steps, clocks = [0] * len(programs), [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while steps[rank] < len(program):
                time = posted.call(rank, program[steps[rank]], clocks[rank])
                if time is None:
                    break
                clocks[rank] = time
                steps[rank] += 1
                progress = True
    for rank, program in enumerate(programs):
        if steps[rank] < len(program):
            raise ScheduleError(f"deadlock: rank {rank} waits forever for {program[steps[rank]].message}")
    return max(clocks, default=0)


class _Posted:
    """Posted sends and receives, and the times of their transfers."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._queues: dict[Hashable, deque[tuple[Message, Verb, int]]] = defaultdict(deque)
        self._free: dict[Hashable, int] = defaultdict(int)
        self._passed: dict[Message, int] = {}

    def call(self, rank: int, call: Call, clock: int) -> int | None:
        """Time at which the caller continues; None: not known yet."""
        if call.message is None:
            return clock + call.ticks
        if call.verb is Verb.WAIT:
            return max(clock, self._passed[call.message]) if call.message in self._passed else None
        self._queues[self._queue(rank, call.message)].append((call.message, call.verb, clock))
        self._let_pass(self._queue(rank, call.message))
        return clock

    def _queue(self, rank: int, message: Message) -> Hashable:
        if self._meeting is Meeting.BY_TAG:
            return rank, message
        if self._meeting is Meeting.BY_PAIR:
            return rank, message.source, message.destination
        return rank, message.source < message.destination

    def _let_pass(self, ours: Hashable) -> None:
        """Transfer messages as long as one is first in the queues of both ends."""
        while self._queues[ours]:
            message, verb, posted = self._queues[ours][0]
            peer = message.destination if verb is Verb.SEND else message.source
            theirs = self._queue(peer, message)
            if not self._queues[theirs]:
                return
            other, other_verb, other_posted = self._queues[theirs][0]
            if (other.source, other.destination, verb) != (message.source, message.destination, _OTHER_END[other_verb]):
                return
            if other != message:
                sent, received = (message, other) if verb is Verb.SEND else (other, message)
                raise ScheduleError(f"{sent} is sent where {received} is received")
            time = max(posted, other_posted, self._free[ours], self._free[theirs])
            self._passed[message] = self._free[ours] = self._free[theirs] = time
            self._queues[ours].popleft()
            self._queues[theirs].popleft()
            self._let_pass(theirs)


_OTHER_END = {Verb.SEND: Verb.RECEIVE, Verb.RECEIVE: Verb.SEND}
