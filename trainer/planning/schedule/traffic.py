"""Posting order of a table's messages, for each communication backend.

The messengers in trainer.pipeline.communication follow these orders, and the check of a table simulates them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from trainer.planning.schedule.table import ActionKind, Exchange, Message, PipelineSchedule, exchanges
from trainer.planning.schedule.timeline import timeline

TICKS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.BACKWARD_INPUT: 1, ActionKind.BACKWARD_WEIGHT: 1}
"""Durations assumed for planning, where the real ones are unknown."""

RECEIVES_AHEAD = 2
"""Number of single receives posted in advance: for the next action, and for the one after, so that its message arrives
while this rank computes."""


def receive_of(exchange: Exchange) -> Message | None:
    """Message that an action needs from another rank; None: no message."""
    return None if exchange.receive is None or exchange.receive.is_local else exchange.receive


def send_of(exchange: Exchange) -> Message | None:
    """Message that an action sends to another rank; None: no message."""
    return None if exchange.send is None or exchange.send.is_local else exchange.send


def receives_as_needed(row: Sequence[Exchange]) -> list[list[Message]]:
    """Receives to post before each action of a row, if messages have tags."""
    wanted = [(step, message) for step, exchange in enumerate(row) if (message := receive_of(exchange)) is not None]
    plan: list[list[Message]] = [[] for _ in row]
    for number, (_, message) in enumerate(wanted):
        # Post when the receive RECEIVES_AHEAD before this one has been consumed.
        earlier = number - RECEIVES_AHEAD
        plan[0 if earlier < 0 else wanted[earlier][0] + 1].append(message)
    return plan


@lru_cache(maxsize=32)
def posts_in_order(schedule: PipelineSchedule) -> list[list[list[Message]]]:
    """Messages to post before each action of each rank, and after the last one.

    Without tags, messages of one group are transferred in the order in which a rank posts them, so that two ranks with
    different orders deadlock. Here all ranks follow one global order: the order in which messages become ready if
    nothing is late. The first untransferred message in this order can always be transferred, because its sender
    depends only on earlier messages, and no message is before it at either end. Within this order receives are posted
    no later than needed and no earlier than RECEIVES_AHEAD allows.
    """
    number = _numbers(schedule)
    return [_rank_posts(exchanges(schedule, rank), number) for rank in range(len(schedule.stages))]


def _rank_posts(row: Sequence[Exchange], number: Mapping[Message, int]) -> list[list[Message]]:
    receives = deque(sorted(filter(None, map(receive_of, row)), key=number.__getitem__))
    earliest = {message: step for step, messages in enumerate(receives_as_needed(row)) for message in messages}
    sends = deque(filter(None, map(send_of, row)))
    plan: list[list[Message]] = []
    for step in range(len(row) + 1):
        posts: list[Message] = []
        if step and (send := send_of(row[step - 1])) is not None:
            sends.popleft()
            while receives and number[receives[0]] < number[send]:
                posts.append(receives.popleft())
            posts.append(send)
        # Compare numbers: searching lists of thousands of messages would dominate the run time.
        needed = receive_of(row[step]) if step < len(row) else None
        last_needed = number[needed] if needed is not None else -1
        limit = number[sends[0]] if sends else len(number)
        while receives and (
            number[receives[0]] <= last_needed or (earliest[receives[0]] <= step and number[receives[0]] < limit)
        ):
            posts.append(receives.popleft())
        plan.append(posts)
    return plan


def _numbers(schedule: PipelineSchedule) -> dict[Message, int]:
    """Messages between ranks, numbered in the order of becoming ready if nothing is late."""
    times = timeline(schedule, TICKS)
    ready = {
        send: (end, rank)
        for rank, spans in enumerate(times.rows)
        for exchange, (_, end) in zip(exchanges(schedule, rank), spans, strict=True)
        if (send := send_of(exchange)) is not None
    }
    return {message: number for number, message in enumerate(sorted(ready, key=ready.__getitem__))}


def message_order(schedule: PipelineSchedule) -> dict[tuple[int, int], tuple[list[Message], list[Message]]]:
    """Send order and receive order of messages, for each (source, destination)."""
    order: dict[tuple[int, int], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for rank in range(len(schedule.stages)):
        for exchange in exchanges(schedule, rank):
            for index, message in enumerate((send_of(exchange), receive_of(exchange))):
                if message is not None:
                    order[message.source, message.destination][index].append(message)
    return order
