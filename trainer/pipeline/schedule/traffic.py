"""How the messages of a table are posted, in each of the ways that a backend allows, as data.

The messengers in trainer.pipeline.communication follow these orders, and the check of a table runs them in simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from trainer.pipeline.schedule.table import Exchange, Message, PipelineSchedule, exchanges

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


def receives_as_sent(schedule: PipelineSchedule, rank: int) -> list[list[Message]]:
    """For each action of a rank the receives to post before it, where messages arrive in the order they are sent.

    That of the action may lie behind others that this rank wants only later: those are posted as well.
    """
    sent = {source: _sends_between(schedule, source, rank) for source in range(len(schedule.stages)) if source != rank}
    plan: list[list[Message]] = []
    posted: set[Message] = set()
    for wanted in receives_as_needed(exchanges(schedule, rank)):
        plan.append([])
        for message in wanted:
            while message not in posted:
                earliest = next(sent[message.source])
                posted.add(earliest)
                plan[-1].append(earliest)
    return plan


def _sends_between(schedule: PipelineSchedule, source: int, destination: int) -> Iterator[Message]:
    sends = map(send_of, exchanges(schedule, source))
    return (message for message in sends if message is not None and message.destination == destination)


def message_order(schedule: PipelineSchedule) -> dict[tuple[int, int], tuple[list[Message], list[Message]]]:
    """For each pair of ranks (source, destination): the messages as they are sent, and as they are wanted."""
    order: dict[tuple[int, int], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for rank in range(len(schedule.stages)):
        for exchange in exchanges(schedule, rank):
            for index, message in enumerate((send_of(exchange), receive_of(exchange))):
                if message is not None:
                    order[message.source, message.destination][index].append(message)
    return order
