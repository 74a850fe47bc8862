"""The ep axis as layers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from trainer.mesh import ParallelMesh, ProcessGroups


@dataclass(frozen=True)
class ExpertParallel:
    """The ep axis as layers see it: rank i of it holds the i-th part of each layer's experts."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None when size is 1."""

    @classmethod
    def build(cls, mesh: ParallelMesh, groups: ProcessGroups) -> ExpertParallel:
        """The ep axis of ``mesh``."""
        return cls(mesh.ep, mesh.ep_rank, groups.ep)
