"""How the messages of a table are posted, in each of the ways that a backend allows, as data.

The messengers in trainer.pipeline.communication follow these orders, and the check of a table runs them in simulation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from trainer.planning.schedule.table import ActionKind, Exchange, Message, PipelineSchedule, exchanges
from trainer.planning.schedule.timeline import timeline

TICKS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.BACKWARD_INPUT: 1, ActionKind.BACKWARD_WEIGHT: 1}
"""How long actions take where a plan must be made without knowing."""

RECEIVES_AHEAD = 2
"""Receives that are posted at one time where each is posted on its own: that of the action to come, and the next one,
so that it arrives while this rank computes."""


def receive_of(exchange: Exchange) -> Message | None:
    """What an action waits for from another rank."""
    return None if exchange.receive is None or exchange.receive.is_local else exchange.receive


def send_of(exchange: Exchange) -> Message | None:
    """What an action gives to another rank."""
    return None if exchange.send is None or exchange.send.is_local else exchange.send


def receives_as_needed(row: Sequence[Exchange]) -> list[list[Message]]:
    """For each action of a row the receives to post before it, where tags tell messages apart."""
    wanted = [(step, message) for step, exchange in enumerate(row) if (message := receive_of(exchange)) is not None]
    plan: list[list[Message]] = [[] for _ in row]
    for number, (_, message) in enumerate(wanted):
        # Posted as soon as the one two before it was taken.
        earlier = number - RECEIVES_AHEAD
        plan[0 if earlier < 0 else wanted[earlier][0] + 1].append(message)
    return plan


@lru_cache(maxsize=32)
def posts_in_order(schedule: PipelineSchedule) -> list[list[list[Message]]]:
    """For each rank and each of its actions, and for the end, the messages to post before it: sends and receives.

    Where messages have no tags, and what a rank posts to one group passes in the order it was posted, two ranks that
    post their messages in different orders wait for each other. Here all ranks follow one order of all messages, that
    in which they come to be sent if nothing is late. Then the first message in it that has not passed always can: all
    that its sender needs are earlier ones, and nothing stands before it at either end. In this order receives are
    posted no later than needed and no earlier than RECEIVES_AHEAD says.
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
        # Numbers instead of searches: with thousands of messages these would take the longest of all.
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
    """All messages between ranks, numbered in the order in which they are ready to be sent if nothing is late."""
    times = timeline(schedule, TICKS)
    ready = {
        send: (end, rank)
        for rank, spans in enumerate(times.rows)
        for exchange, (_, end) in zip(exchanges(schedule, rank), spans, strict=True)
        if (send := send_of(exchange)) is not None
    }
    return {message: number for number, message in enumerate(sorted(ready, key=ready.__getitem__))}


def message_order(schedule: PipelineSchedule) -> dict[tuple[int, int], tuple[list[Message], list[Message]]]:
    """For each pair of ranks (source, destination): the messages as they are sent, and as they are wanted."""
    order: dict[tuple[int, int], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for rank in range(len(schedule.stages)):
        for exchange in exchanges(schedule, rank):
            for index, message in enumerate((send_of(exchange), receive_of(exchange))):
                if message is not None:
                    order[message.source, message.destination][index].append(message)
    return order
