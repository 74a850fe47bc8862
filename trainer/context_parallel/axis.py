"""The cp axis as layers see it: which positions of a sequence lie on which rank.

Legend: S sequence, ``/c`` = divided over cp.
With ring attention (``p2p``; Liu et al. 2023, arXiv:2310.01889) a sequence is cut into 2c chunks and rank i holds the
chunks i and 2c-1-i, so that under a causal mask every rank has the same work. With ``a2a`` (Jacobs et al. 2023,
arXiv:2309.14509, section 3) rank i holds the i-th c-th of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from trainer.data.batches import MicroBatch
    from trainer.mesh import ParallelMesh, ProcessGroups

CommunicationType = Literal["p2p", "a2a"]


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
        if self.communication == "a2a":
            return everything.view(self.size, -1)[self.rank]
        chunks = everything.view(2 * self.size, -1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]))

    def shard(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor whose ``dim`` is the sequence; all of it when size is 1. With a2a a view.

        Raises:
            ValueError: the sequence cannot be divided.
        """
        if self.size == 1:
            return whole
        # Views, and not an index: it would come from pageable memory, for which a GPU's queue is waited for every time.
        own = (self.rank,) if self.communication == "a2a" else (self.rank, 2 * self.size - 1 - self.rank)
        length, rest = divmod(whole.shape[dim], len(own) * self.size)
        if rest:
            raise ValueError(
                f"context-parallel rank {self.rank}: a sequence of {whole.shape[dim]} cannot be divided into "
                f"{len(own) * self.size} chunks"
            )
        chunks = [whole.narrow(dim, chunk * length, length) for chunk in own]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[S, ...] in the order of positions from every rank's [S/c, ...], outside autograd (collective: all of cp)."""
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
        """What the length of a sequence must be a multiple of."""
        return 1 if self.size == 1 else self.size * (2 if self.communication == "p2p" else 1)

    def shard_micro_batch(self, whole: MicroBatch) -> MicroBatch:
        """This rank's part of every sample of a micro-batch; ``documents`` still speak of whole samples."""
        if self.size == 1:
            return whole
        tokens, labels = self.shard(whole.tokens, 1), self.shard(whole.labels, 1)
        mask, positions = (None if part is None else self.shard(part, 1) for part in (whole.loss_mask, whole.positions))
        return replace(whole, tokens=tokens, labels=labels, loss_mask=mask, positions=positions)
