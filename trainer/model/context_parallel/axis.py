"""The cp axis as layers see it: the positions that each rank holds.

Legend: S sequence, ``/c`` = divided over cp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.planning.sequence_division import CommunicationType, held_chunks, sequence_divisor

if TYPE_CHECKING:
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups


@dataclass(frozen=True)
class ContextParallel:
    """The cp axis as layers see it."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None when size is 1."""
    communication: CommunicationType = "p2p"

    @classmethod
    def build(cls, mesh: ParallelMesh, groups: ProcessGroups, communication: CommunicationType) -> ContextParallel:
        """The cp axis of ``mesh``."""
        return cls(mesh.cp, mesh.cp_rank, groups.cp, communication)

    def positions(self, length: int) -> torch.Tensor:
        """Positions int64 [S/c] that this rank holds of a sequence of ``length``, ascending."""
        everything = torch.arange(length)
        if self.size == 1:
            return everything
        own = self._chunks
        return everything.view(len(own) * self.size, -1)[list(own)].flatten()

    def shard(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor along its sequence ``dim``.

        All of it if size is 1. A view with a2a.

        Raises:
            ValueError: the sequence cannot be divided.
        """
        if self.size == 1:
            return whole
        # Views instead of an index: an index would come from pageable memory and synchronise with the GPU every time.
        own = self._chunks
        length, rest = divmod(whole.shape[dim], len(own) * self.size)
        if rest:
            raise ValueError(
                f"context-parallel rank {self.rank}: a sequence of {whole.shape[dim]} cannot be divided into "
                f"{len(own) * self.size} chunks"
            )
        chunks = [whole.narrow(dim, chunk * length, length) for chunk in own]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[S, ...] in order of positions from every rank's [S/c, ...]. No autograd.

        Collective: all cp ranks.
        """
        if self.group is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        whole = part.new_empty((len(part) * self.size, *part.shape[1:]))
        for rank, one in enumerate(parts):
            whole[replace(self, rank=rank).positions(len(whole)).to(whole.device)] = one
        return whole

    @property
    def divisor(self) -> int:
        """Divisor of every valid sequence length."""
        return sequence_divisor(self.size, self.communication)

    @property
    def _chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks that this rank holds."""
        return held_chunks(self.rank, self.size, self.communication)

    def shard_micro_batch(self, whole: MicroBatch) -> MicroBatch:
        """This rank's part of every sample of a micro-batch; ``documents`` still describe whole samples."""
        if self.size == 1:
            return whole
        tokens, labels = self.shard(whole.tokens, 1), self.shard(whole.labels, 1)
        mask = None if whole.loss_mask is None else self.shard(whole.loss_mask, 1)
        further = tuple(one.with_parts(partial(self.shard, dim=1)) for one in whole.further)
        return replace(whole, tokens=tokens, labels=labels, loss_mask=mask, further=further)
