"""Messages between ranks over a gloo group of their own: texts of all ranks, and bytes from one rank to another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 16 << 20
"""Most bytes of one message: a rank keeps a few of them in memory while it writes."""


def gather_texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The texts of all ranks of the job, in their order. Collective: all ranks."""
    size = dist.get_world_size()
    if size == 1:
        return [text]
    data = text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, own, group=group)
    return [bytes(each[: int(length)].numpy().tobytes()).decode() for each, length in zip(found, lengths, strict=True)]


def send(data: Tensor, target: int, group: dist.ProcessGroup | None) -> None:
    """Send bytes, 1-D uint8, to the rank ``target``, which calls ``receive_into`` with as many."""
    for chunk in torch.split(data, CHUNK_BYTES):
        dist.send(chunk, target, group=group)


def receive_into(data: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Fill ``data``, 1-D uint8, with bytes that the rank ``source`` sends."""
    for chunk in torch.split(data, CHUNK_BYTES):
        dist.recv(chunk, source, group=group)


def exchange_chunks(
    own: Tensor, size: int, target: int, source: int, group: dist.ProcessGroup | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Send ``own`` to one rank while ``size`` bytes come from another; both in chunks, of 0 bytes after the last.

    The chunks that come have memory of their own.
    """
    steps = range(0, max(own.numel(), size, 1), CHUNK_BYTES)
    for start in steps:
        outgoing = own[start : start + CHUNK_BYTES]
        incoming = torch.empty(max(0, min(CHUNK_BYTES, size - start)), dtype=torch.uint8)
        work = [dist.isend(outgoing, target, group=group)] if outgoing.numel() else []
        work += [dist.irecv(incoming, source, group=group)] if incoming.numel() else []
        for each in work:
            if each is not None:
                each.wait()
        yield outgoing, incoming
