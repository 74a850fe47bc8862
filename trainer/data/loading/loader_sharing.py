"""Which ranks need a batch, which of them read it, and how the others get it.

Tokens are needed by the first stage of the pipeline, labels by the stage with the loss, and by those between only where
documents end: attention and positions depend on it. Files of tokens are mapped into memory; there each rank that needs
a batch reads it: 32 samples of 2048 tokens take 0.6 ms on each of two ranks, and 1.0 ms where one sends them to the
other through gloo on the same machine. Text is encoded by one rank of each replica, which sends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh

Windows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BatchRole:
    """What one rank has to do with the batches of its replica.

    Attributes:
        needs: it computes with tokens, labels or the places of documents.
        reads: it reads them itself.
        source: the global rank that sends them to this one; None: nobody does.
        group: ranks that share what ``source`` reads; None: there is no other.
        device: where tensors for ``group`` lie.
    """

    needs: bool = True
    reads: bool = True
    source: int | None = None
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")

    def share(self, windows: Windows | None, shape: tuple[int, ...]) -> Windows:
        """``windows`` of the rank that reads, on all ranks of ``group`` (collective: all of them).

        Args:
            windows: on the rank that reads.
            shape: of it, the same on all.
        """
        if self.group is None:
            assert windows is not None
            return windows
        assert self.source is not None
        message = torch.empty(shape, dtype=torch.int32) if windows is None else torch.from_numpy(windows)
        message = message.to(self.device)
        dist.broadcast(message, src=self.source, group=self.group)
        return message.cpu().numpy()


def needing_ranks(mesh: ParallelMesh, dp_rank: int, by_all: bool) -> tuple[int, ...]:
    """The ranks of a replica that need its batches; the first one, of the first stage, reads for all.

    Args:
        mesh: seen from any rank.
        dp_rank: number of the replica.
        by_all: stages in the middle need to know where documents end.
    """
    places = (mesh.at(rank) for rank in range(mesh.world_size))
    return tuple(
        place.rank
        for place in places
        if place.dp_rank == dp_rank and (by_all or place.is_first_stage or place.computes_loss)
    )


def mapped_role(mesh: ParallelMesh, by_all: bool) -> BatchRole:
    """The role of ``mesh.rank`` where tokens are in files that every rank can read."""
    needs = mesh.rank in needing_ranks(mesh, mesh.dp_rank, by_all)
    return BatchRole(needs, needs)


def streaming_role(mesh: ParallelMesh, by_all: bool, device: torch.device, timeout: timedelta) -> BatchRole:
    """The role of ``mesh.rank`` where one rank of each replica encodes text.

    Collective: all ranks of the default group.

    Args:
        mesh: seen from this rank.
        by_all: see ``needing_ranks``.
        device: of the model.
        timeout: of a broadcast; encoding that takes longer is a failure.
    """
    role = BatchRole(needs=False, reads=False)
    for replica in range(mesh.dp):
        members = needing_ranks(mesh, replica, by_all)
        # Every rank makes every group: new_group is collective over the default group, members or not.
        group = dist.new_group(list(members), timeout=timeout) if len(members) > 1 else None
        if mesh.rank in members:
            role = BatchRole(True, mesh.rank == members[0], members[0], group, device)
    return role
