"""Messages between the ranks of a pipeline, for the exchanges of a schedule table.

One interface, three implementations. With gloo every message is a separate tagged send and receive. NCCL has no
tags, and the messages of a rank within one group pass in the order in which the rank posted them (with a device bound
to the group, single messages also go through one communicator: pytorch#154132). With NCCL, all messages between two
actions form one batch if the table loses no time by it; otherwise all ranks post single messages in one common order.
The torch-free trainer.planning.schedule computes these orders, and its check simulates them.

No implementation sends a message from a rank to itself.
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
class PipelinePeers:
    """Groups, ranks and shapes of the messages of one run of a table."""

    group: dist.ProcessGroup
    """For messages to higher ranks, and for all batched or tagged messages."""
    group_up: dist.ProcessGroup
    """For messages to lower ranks; the same group if messages have tags."""
    ranks: tuple[int, ...]
    """Global ranks of the pipeline, in its order."""
    shapes: Sequence[tuple[int, ...]]
    """Shape of the messages of each micro-batch."""
    dtype: torch.dtype
    device: torch.device

    def empty(self, message: Message, device: torch.device | None = None) -> Tensor:
        """An empty buffer for a message."""
        return torch.empty(self.shapes[message.micro_batch], dtype=self.dtype, device=device or self.device)

    def group_of(self, message: Message) -> dist.ProcessGroup:
        """Group of a single message without a tag."""
        return self.group if message.source < message.destination else self.group_up


class StageCommunicator:
    """One rank's messages in one run of a schedule table.

    This base class serves a pipeline on a single rank.
    """

    def __init__(self, row: Sequence[Exchange]) -> None:
        self._row = row
        self._handed_over: dict[Message, Tensor] = {}

    def exchange(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        """Send the last action's output, and return the input of action ``step``."""
        outgoing = self._keep_local(self._row[step - 1].send if step else None, outgoing)
        receive = self._row[step].receive
        incoming = self._carry(step, outgoing)
        if receive is not None and receive.is_local:
            return self._handed_over.pop(receive)
        return incoming

    def finish(self, outgoing: Tensor | None) -> None:
        """Send the output of the last action, and wait until all sends have finished."""
        self._carry(len(self._row), self._keep_local(self._row[-1].send, outgoing))
        self._wait_until_all_left()

    def _keep_local(self, send: Message | None, outgoing: Tensor | None) -> Tensor | None:
        """The output to send.

        None if no rank needs it, or if this rank keeps it for itself.
        """
        if send is None:
            return None
        assert outgoing is not None, f"the action before gave no tensor to send as {send}"
        if not send.is_local:
            return outgoing
        self._handed_over[send] = outgoing
        return None

    def _carry(self, _step: int, _outgoing: Tensor | None) -> Tensor | None:
        """Send the last action's output; return the message for action ``step``, if any."""
        return None

    def _wait_until_all_left(self) -> None:
        """Wait until every sent tensor may be overwritten."""


class TaggedCommunicator(StageCommunicator):
    """Single tagged sends and receives (gloo).

    Receives are posted ahead and arrive while this rank computes.

    If gloo cannot send from the device's memory, messages go through host memory.
    """

    def __init__(self, peers: PipelinePeers, schedule: PipelineSchedule, rank: int, most_leaving: int) -> None:
        super().__init__(exchanges(schedule, rank))
        self._peers = peers
        self._device = message_device(peers.group, peers.device)
        self._virtual_stages = schedule.placement.num_virtual_stages
        self._most_leaving = most_leaving
        self._posts = receives_as_needed(self._row)
        self._arriving: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        # Keeps sent tensors alive until their send has finished. Gloo reports the end only to a waiting caller.
        self._leaving: deque[tuple[dist.Work | None, Tensor]] = deque()

    def _carry(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        if outgoing is not None and (send := self._row[step - 1].send) is not None:
            tensor = outgoing.to(self._device).contiguous()
            destination = self._peers.ranks[send.destination]
            self._leaving.append((dist.isend(tensor, destination, self._peers.group, self._tag(send)), tensor))
        if step == len(self._row):
            return None
        for message in self._posts[step]:
            buffer = self._peers.empty(message, self._device)
            source = self._peers.ranks[message.source]
            self._arriving[message] = dist.irecv(buffer, source, self._peers.group, self._tag(message)), buffer
        self._wait_until_left(self._most_leaving)
        receive = receive_of(self._row[step])
        if receive is None:
            return None
        work, incoming = self._arriving.pop(receive)
        if work is not None:
            work.wait()
        return incoming.to(self._peers.device)

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


class BatchedCommunicator(StageCommunicator):
    """All sends and receives between two actions in one batch.

    For tables that pass suits_batches.
    """

    def __init__(self, peers: PipelinePeers, schedule: PipelineSchedule, rank: int) -> None:
        super().__init__(exchanges(schedule, rank))
        self._peers = peers

    def _carry(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        operations = []
        if outgoing is not None and (send := self._row[step - 1].send) is not None:
            peer = self._peers.ranks[send.destination]
            operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), peer, self._peers.group))
        incoming = None
        receive = receive_of(self._row[step]) if step < len(self._row) else None
        if receive is not None:
            incoming, peer = self._peers.empty(receive), self._peers.ranks[receive.source]
            operations.append(dist.P2POp(dist.irecv, incoming, peer, self._peers.group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return incoming


class OrderedCommunicator(StageCommunicator):
    """Single sends and receives that match without tags.

    All ranks post them in one order.

    Before the end a rank waits for receives only. Messages to higher and to lower ranks use different groups: a late
    message in one direction does not delay the other direction.
    """

    def __init__(self, peers: PipelinePeers, schedule: PipelineSchedule, rank: int) -> None:
        super().__init__(exchanges(schedule, rank))
        self._peers = peers
        self._rank = rank
        self._posts = posts_in_order(schedule)[rank]
        self._arriving: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self._leaving: deque[tuple[dist.Work | None, Tensor]] = deque()

    def _carry(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        while self._leaving and ((first := self._leaving[0][0]) is None or first.is_completed()):
            if first is not None:
                # Returns at once. NCCL releases the tensor only after wait, and only wait raises a failed send's error.
                first.wait()
            self._leaving.popleft()
        for message in self._posts[step]:
            group = self._peers.group_of(message)
            if message.source == self._rank:
                assert outgoing is not None
                tensor = outgoing.contiguous()
                peer = self._peers.ranks[message.destination]
                self._leaving.append((dist.isend(tensor, peer, group), tensor))
            else:
                buffer, peer = self._peers.empty(message), self._peers.ranks[message.source]
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


def build_communicator(peers: PipelinePeers | None, schedule: PipelineSchedule, rank: int) -> StageCommunicator:
    """The communicator for a table and the backend of their group.

    ``peers`` is None for a pipeline of one rank.
    """
    if peers is None:
        return StageCommunicator(exchanges(schedule, rank))
    if is_gloo(peers.group):
        return TaggedCommunicator(peers, schedule, rank, sends_under_way(schedule))
    # A batch runs a send and a receive in one call and at once under NCCL, but ends only when both have finished.
    return (BatchedCommunicator if suits_batches(schedule) else OrderedCommunicator)(peers, schedule, rank)
