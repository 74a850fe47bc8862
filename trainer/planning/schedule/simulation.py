"""The calls of a messenger, run in simulation: whether all messages meet, and how long that takes.

A message passes when its send and its receive have both been posted: nothing is counted on that a backend may buffer.
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
    """Single sends and receives in the one order of posts_in_order; nothing but a receive is waited for."""
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
    """How many sends with tags a rank should have under way at one time: the fewest with which nobody waits for them.

    Each of them keeps a stage's output in memory. They also bound how far a rank runs ahead where no answer comes back,
    as in evaluation. All follows from the times of the table: nothing is tried, which would take a large one minutes.
    """
    times = timeline(schedule, TICKS).rows
    rows = [exchanges(schedule, rank) for rank in range(len(schedule.stages))]
    # A receive is posted as soon as the action before its step has ended; what is posted at both ends passes.
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
    """Sends from the oldest that has not passed when an action starts to the last before it, at the most."""
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
    """Which send meets which receive."""

    BY_TAG = "each its own"
    BY_PAIR = "the first send from one rank to another meets the first receive there, whatever each is meant for"
    BY_STREAM = "as by pair, and nothing passes on a rank before what it posted earlier in the same direction"


def run_programs(programs: Sequence[Sequence[Call]], meeting: Meeting) -> float:
    """Run what every rank calls until all are done; returns the ticks that takes.

    Args:
        programs: the calls of each rank.
        meeting: which send meets which receive. A direction is that to higher or that to lower ranks.

    Raises:
        ScheduleError: some rank waits for ever, or a message is taken for another.
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
            raise ScheduleError(f"deadlock: rank {rank} waits for ever for {program[steps[rank]].message}")
    return max(clocks, default=0)


class _Posted:
    """Sends and receives that have been posted, and when they met."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._queues: dict[Hashable, deque[tuple[Message, Verb, int]]] = defaultdict(deque)
        self._free: dict[Hashable, int] = defaultdict(int)
        self._passed: dict[Message, int] = {}

    def call(self, rank: int, call: Call, clock: int) -> int | None:
        """When the caller can go on; None as long as that is not known."""
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
        """Let what stands first at both of its ends pass, and then what stood behind it."""
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
