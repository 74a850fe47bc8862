"""Messages between neighbouring pipeline stages, for the exchanges that a schedule table asks for.

Two ways, one contract. With gloo every message is sent and received on its own, told apart by a tag: receives are
posted one action ahead, so that they arrive while this stage computes. With NCCL, which has no tags and where a lone
send may block until it is received, what lies between two actions is posted as one batch; trainer.pipeline.schedule's
check shows that the batches of a table always meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.pipeline.schedule import ActionKind, Exchange, Message


@dataclass(frozen=True)
class Wire:
    """What the messages of one run look like and whom they go to."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks of the pipeline, first stage first."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Room for one message."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Messenger(Protocol):
    """This stage's messages in one run of a schedule table."""

    def exchange(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        """Send what the action before ``step`` gave and return what the action at ``step`` waits for."""

    def finish(self, outgoing: Tensor | None) -> None:
        """Send what the last action gave and wait until everything that was sent has left."""


class NoMessenger:
    """A pipeline of one stage has nobody to talk to."""

    def exchange(self, _step: int, _outgoing: Tensor | None) -> None:
        """Nothing comes."""

    def finish(self, _outgoing: Tensor | None) -> None:
        """Nothing goes."""


# Sends under way at one time. The neighbour posts its receive an action ahead, so that with two nobody waits; and they
# bound what a stage keeps of its outputs, and how far it runs ahead where no answer comes back. A table that passes
# check, where each send is waited for before the next action, cannot stand still with more room than that.
_MOST_LEAVING = 2


class TaggedMessenger:
    """Single sends and receives with tags (gloo)."""

    def __init__(self, wire: Wire, row: Sequence[Exchange]) -> None:
        self._wire = wire
        self._row = row
        self._arriving: dict[int, tuple[dist.Work | None, Tensor]] = {}
        # Sent tensors live here until they have left. Gloo says so only to those who wait.
        self._leaving: deque[tuple[dist.Work | None, Tensor]] = deque()

    def exchange(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        """See Messenger."""
        if step:
            self._send(self._row[step - 1].send, outgoing)
        self._post(step)
        self._post(step + 1)
        work, incoming = self._arriving.pop(step, (None, None))
        if work is not None:
            work.wait()
        return incoming

    def finish(self, outgoing: Tensor | None) -> None:
        """See Messenger."""
        self._send(self._row[-1].send, outgoing)
        self._wait_until_left(0)

    def _post(self, step: int) -> None:
        message = self._row[step].receive if step < len(self._row) else None
        if message is not None and step not in self._arriving:
            buffer = self._wire.empty()
            source = self._wire.ranks[message.source]
            self._arriving[step] = dist.irecv(buffer, source, self._wire.group, _tag(message)), buffer

    def _send(self, message: Message | None, tensor: Tensor | None) -> None:
        if message is None:
            return
        assert tensor is not None
        tensor = tensor.contiguous()
        destination = self._wire.ranks[message.destination]
        self._leaving.append((dist.isend(tensor, destination, self._wire.group, _tag(message)), tensor))
        self._wait_until_left(_MOST_LEAVING)

    def _wait_until_left(self, most: int) -> None:
        while len(self._leaving) > most:
            work, _ = self._leaving.popleft()
            if work is not None:
                work.wait()


def _tag(message: Message) -> int:
    return 2 * message.micro_batch + (message.kind is ActionKind.BACKWARD)


class BatchedMessenger:
    """All sends and receives between two actions in one batch (NCCL)."""

    def __init__(self, wire: Wire, row: Sequence[Exchange]) -> None:
        self._wire = wire
        self._row = row

    def exchange(self, step: int, outgoing: Tensor | None) -> Tensor | None:
        """See Messenger."""
        return self._batch(self._row[step - 1].send if step else None, outgoing, self._row[step].receive)

    def finish(self, outgoing: Tensor | None) -> None:
        """See Messenger."""
        self._batch(self._row[-1].send, outgoing, None)

    def _batch(self, send: Message | None, outgoing: Tensor | None, receive: Message | None) -> Tensor | None:
        operations = []
        if send is not None:
            assert outgoing is not None
            peer = self._wire.ranks[send.destination]
            operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), peer, self._wire.group))
        incoming = None
        if receive is not None:
            incoming, peer = self._wire.empty(), self._wire.ranks[receive.source]
            operations.append(dist.P2POp(dist.irecv, incoming, peer, self._wire.group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return incoming


def build_messenger(wire: Wire | None, row: Sequence[Exchange]) -> Messenger:
    """The messenger for the backend of the wire's group; ``wire`` is None where the pipeline has one stage."""
    if wire is None:
        return NoMessenger()
    return BatchedMessenger(wire, row) if wire.device.type == "cuda" else TaggedMessenger(wire, row)
