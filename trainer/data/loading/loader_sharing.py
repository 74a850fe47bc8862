"""Roles of a replica's ranks in loading a batch: read, receive, or neither.

The first pipeline stage needs the tokens, the stage with the loss the labels, and the stages between only the document
ends, for attention and positions. Prepared data is memory-mapped, and each rank that needs a batch reads it: 32 samples
of 2048 tokens take 0.6 ms on each of two ranks, but 1.0 ms if one rank sends them to the other through gloo on the same
machine. Streamed text is tokenized by one rank of each replica, which broadcasts the tokens.
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
    """Role of one rank in loading the batches of its replica.

    Attributes:
        needs: True if the rank needs tokens, labels or document ends.
        reads: True if the rank reads the batches itself.
        source: global rank that broadcasts the batches; None: no broadcast.
        group: ranks that receive the broadcast of ``source``, including it; None: no other rank.
        device: device of the tensors for ``group``.
    """

    needs: bool = True
    reads: bool = True
    source: int | None = None
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")

    def share(self, windows: Windows | None, shape: tuple[int, ...]) -> Windows:
        """Broadcast ``windows`` of the reading rank. Collective: all ranks of ``group``.

        Args:
            windows: the windows on the reading rank; None on the others.
            shape: shape of the windows, the same on all ranks.
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
    """Ranks of a replica that need its batches.

    The first, of the first stage, reads for all.

    Args:
        mesh: the mesh, as seen from any rank.
        dp_rank: number of the replica.
        by_all: True if the middle stages need the document ends.
    """
    places = (mesh.at(rank) for rank in range(mesh.world_size))
    return tuple(
        place.rank
        for place in places
        if place.dp_rank == dp_rank and (by_all or place.is_first_stage or place.computes_loss)
    )


def mapped_role(mesh: ParallelMesh, by_all: bool) -> BatchRole:
    """Role of ``mesh.rank`` for prepared data, which every rank can read."""
    needs = mesh.rank in needing_ranks(mesh, mesh.dp_rank, by_all)
    return BatchRole(needs, needs)


def streaming_role(mesh: ParallelMesh, by_all: bool, device: torch.device, timeout: timedelta) -> BatchRole:
    """Role of ``mesh.rank`` for streaming, where one rank of each replica tokenizes text.

    Collective: all ranks of the default group.

    Args:
        mesh: the mesh, as seen from this rank.
        by_all: see ``needing_ranks``.
        device: device of the model.
        timeout: timeout of a broadcast, and so of the tokenization of a batch.
    """
    role = BatchRole(needs=False, reads=False)
    for replica in range(mesh.dp):
        members = needing_ranks(mesh, replica, by_all)
        # Every rank creates every group: new_group is collective over the default group, members or not.
        is_shared = len(members) > 1
        group = dist.new_group(list(members), timeout=timeout, group_desc="batches") if is_shared else None
        if mesh.rank in members:
            role = BatchRole(True, mesh.rank == members[0], members[0], group, device)
    return role
