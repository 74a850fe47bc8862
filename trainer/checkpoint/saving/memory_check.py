"""A check before the first step: every node has the host memory for the copies of a save."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from trainer.config.errors import ConfigError
from trainer.distributed.collectives import first_text, sum_over_ranks

_GIB = 1 << 30


class CopyMemory(NamedTuple):
    """Host memory for the copies of a save, in bytes.

    Attributes:
        of_rank: of the rank with the most.
        of_node: of all ranks on this rank's node.
    """

    of_rank: int
    of_node: int


class CopyUse(NamedTuple):
    """Words for a refusal: the key of the config, what is copied, and what to do."""

    key: str
    what: str
    remedy: str


OF_SAVES = CopyUse("checkpoint.async_save", "copies of a save", "set checkpoint.async_save to false")


def check_copies_fit(
    size: int, free: int, device: torch.device, node: int | None = None, use: CopyUse = OF_SAVES
) -> CopyMemory:
    """Make sure that every node has the memory for the copies of its ranks, before any rank takes its own.

    Collective: all ranks.

    Args:
        size: of this rank's copy, in bytes.
        free: memory that is available on this rank's node, by the machine and by its control groups.
        device: of the small tensors of collectives.
        node: number of this rank's node; None: by the id of the machine's boot.
        use: of the copies, for the refusal.

    Raises:
        ConfigError: a node has too little; the same sentence on all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes, nodes = [0.0] * world_size, [0.0] * world_size
    sizes[rank] = float(size)
    nodes[rank] = own = float(node_number() if node is None else node)
    sums = sum_over_ranks([*sizes, *nodes], device)
    sizes, nodes = sums[:world_size], sums[world_size:]
    here = [int(one) for one, other in zip(sizes, nodes, strict=True) if other == own]
    sentence = ""
    if sum(here) > free:
        sentence = (
            f"the {use.what} take {sum(here) / _GIB:.2f} GiB of host memory on {socket.gethostname()} for "
            f"{len(here)} rank{'s' if len(here) > 1 else ''}, but {free / _GIB:.2f} GiB are available; "
            f"{use.remedy}, or give the job more memory or nodes"
        )
    told = first_text(sentence, device)
    if told:
        raise ConfigError(use.key, told)
    return CopyMemory(int(max(sizes)), sum(here))


def node_number() -> int:
    """A number of this machine's boot, equal in all containers on it, and exact as a float64."""
    with suppress(OSError, ValueError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return int(boot.replace("-", "")[:12], 16)
    return int.from_bytes(socket.gethostname().encode()[-6:], "big")
