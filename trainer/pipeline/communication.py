"""Messages between the ranks of a pipeline, for the exchanges that a schedule table asks for.

One contract, three ways. With gloo every message is sent and received on its own, told apart by a tag. NCCL has no
tags, and what a rank posts to one group passes in the order it was posted (with a device bound to the group, single
messages go through one communicator as well: pytorch#154132). There, what lies between two actions is posted as one
batch, for tables that lose nothing by it; for the others single messages are posted in one order on all ranks. The
torch-free trainer.planning.schedule has these orders, and its check runs them in simulation.

What a rank hands over to itself does not travel in any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.collectives import is_gloo, message_device
from trainer.planning.schedule import (
    ActionKind,
    Exchange,
    Message,
    PipelineSchedule,
    exchanges,
    sends_under_way,
    suits_batches,
)
from trainer.planning.schedule.traffic import posts_in_order, receive_of, receives_as_needed


@dataclass(frozen=True)
class Wire:
    """What the messages of one run look like and whom they go to."""

    group: dist.ProcessGroup
    """For messages to higher ranks, and for all that are batched or have tags."""
    group_up: dist.ProcessGroup
    """For messages to lower ranks; the same group where messages have tags."""
    ranks: tuple[int, ...]
    """Global ranks of the pipeline, in its order."""
    shapes: Sequence[tuple[int, ...]]
    """Of the messages of each micro-batch."""
    dtype: torch.dtype
    device: torch.device

    def empty(self, message: Message, device: torch.device | None = None) -> Tensor:
        """Room for a message."""
        return torch.empty(self.shapes[message.micro_batch], dtype=self.dtype, device=device or self.device)

    def group_of(self, message: Message) -> dist.ProcessGroup:
        """Where a single message without a tag goes."""
        return self.group if message.source < message.destination else self.group_up


class Messenger:
    """One rank's messages in one run of a schedule table. This one serves a pipeline on a single rank."""

    def __init__(self, row: Sequence[Exchange]) -> None:
        self._row = row
        self._handed_over: dict[Message, Tensor] = {}

    def exchange(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        """Send what the action before ``step`` gave and return what the action at ``step`` waits for."""
        outgoing = self._keep_local(self._row[step - 1].send if step else None, outgoing)
        receive = self._row[step].receive
        incoming = self._carry(step, outgoing)
        if receive is not None and receive.is_local:
            return self._handed_over.pop(receive)
        return incoming

    def finish(self, outgoing: Tensor | None) -> None:
        """Send what the last action gave and wait until everything that was sent has left."""
        self._carry(len(self._row), self._keep_local(self._row[-1].send, outgoing))
        self._wait_until_all_left()

    def _keep_local(self, send: Message | None, outgoing: Tensor | None) -> Tensor | None:
        """What has to travel: not what this rank hands over to itself, nor what nobody waits for."""
        if send is None:
            return None
        assert outgoing is not None, f"there is nothing to send as {send}"
        if not send.is_local:
            return outgoing
        self._handed_over[send] = outgoing
        return None

    def _carry(self, _step: int, _outgoing: Tensor | None) -> Tensor | None:
        """Send what travels of the action before ``step``; return what the action at ``step`` gets from others."""
        return None

    def _wait_until_all_left(self) -> None:
        """Return when every tensor that was sent may be written to."""


class TaggedMessenger(Messenger):
    """Single sends and receives with tags (gloo), receives posted ahead so that they arrive while this rank computes.

    On a device whose memory gloo cannot send from, messages take the way through the host.
    """

    def __init__(self, wire: Wire, schedule: PipelineSchedule, rank: int, most_leaving: int) -> None:
        super().__init__(exchanges(schedule, rank))
        self._wire = wire
        self._device = message_device(wire.group, wire.device)
        self._virtual_stages = schedule.placement.num_virtual_stages
        self._most_leaving = most_leaving
        self._posts = receives_as_needed(self._row)
        self._arriving: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        # Sent tensors live here until they have left. Gloo says so only to those who wait.
        self._leaving: deque[tuple[dist.Work | None, Tensor]] = deque()

    def _carry(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        if outgoing is not None and (send := self._row[step - 1].send) is not None:
            tensor = outgoing.to(self._device).contiguous()
            destination = self._wire.ranks[send.destination]
            self._leaving.append((dist.isend(tensor, destination, self._wire.group, self._tag(send)), tensor))
        if step == len(self._row):
            return None
        for message in self._posts[step]:
            buffer = self._wire.empty(message, self._device)
            source = self._wire.ranks[message.source]
            self._arriving[message] = dist.irecv(buffer, source, self._wire.group, self._tag(message)), buffer
        self._wait_until_left(self._most_leaving)
        receive = receive_of(self._row[step])
        if receive is None:
            return None
        work, incoming = self._arriving.pop(receive)
        if work is not None:
            work.wait()
        return incoming.to(self._wire.device)

    def _tag(self, message: Message) -> int:
        number = message.micro_batch * self._virtual_stages + message.virtual_stage
        return 2 * number + (message.kind is ActionKind.BACKWARD)

    def _wait_until_all_left(self) -> None:
        self._wait_until_left(0)

    def _wait_until_left(self, most: int) -> None:
        while len(self._leaving) > most:
            work, _ = self._leaving.popleft()
            if work is not None:
                work.wait()


class BatchedMessenger(Messenger):
    """All sends and receives between two actions in one batch, for tables that suit_batches."""

    def __init__(self, wire: Wire, schedule: PipelineSchedule, rank: int) -> None:
        super().__init__(exchanges(schedule, rank))
        self._wire = wire

    def _carry(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        operations = []
        if outgoing is not None and (send := self._row[step - 1].send) is not None:
            peer = self._wire.ranks[send.destination]
            operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), peer, self._wire.group))
        incoming = None
        receive = receive_of(self._row[step]) if step < len(self._row) else None
        if receive is not None:
            incoming, peer = self._wire.empty(receive), self._wire.ranks[receive.source]
            operations.append(dist.P2POp(dist.irecv, incoming, peer, self._wire.group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return incoming


class OrderedMessenger(Messenger):
    """Single sends and receives, posted in one order on all ranks, so that they meet without tags.

    Only a receive is ever waited for before the end. Messages to higher and to lower ranks go through different
    groups: what is late in one direction does not hold up the other.
    """

    def __init__(self, wire: Wire, schedule: PipelineSchedule, rank: int) -> None:
        super().__init__(exchanges(schedule, rank))
        self._wire = wire
        self._rank = rank
        self._posts = posts_in_order(schedule)[rank]
        self._arriving: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self._leaving: deque[tuple[dist.Work | None, Tensor]] = deque()

    def _carry(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        while self._leaving and ((first := self._leaving[0][0]) is None or first.is_completed()):
            if first is not None:
                # Returns at once. Only then does NCCL let go of the tensor, and only here is a failed send raised.
                first.wait()
            self._leaving.popleft()
        for message in self._posts[step]:
            group = self._wire.group_of(message)
            if message.source == self._rank:
                assert outgoing is not None
                tensor = outgoing.contiguous()
                peer = self._wire.ranks[message.destination]
                self._leaving.append((dist.isend(tensor, peer, group), tensor))
            else:
                buffer, peer = self._wire.empty(message), self._wire.ranks[message.source]
                self._arriving[message] = dist.irecv(buffer, peer, group), buffer
        receive = receive_of(self._row[step]) if step < len(self._row) else None
        if receive is None:
            return None
        work, incoming = self._arriving.pop(receive)
        if work is not None:
            work.wait()
        return incoming

    def _wait_until_all_left(self) -> None:
        for work, _ in self._leaving:
            if work is not None:
                work.wait()
        self._leaving.clear()


def build_messenger(wire: Wire | None, schedule: PipelineSchedule, rank: int) -> Messenger:
    """The messenger for a table and the backend of the wire's group; ``wire`` is None on a pipeline of one rank."""
    if wire is None:
        return Messenger(exchanges(schedule, rank))
    if is_gloo(wire.group):
        return TaggedMessenger(wire, schedule, rank, sends_under_way(schedule))
    # A batch needs one call for a send and a receive, and NCCL runs both at once; but it ends when both have passed.
    return (BatchedMessenger if suits_batches(schedule) else OrderedMessenger)(wire, schedule, rank)
