"""What layers know of the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.context_parallel.axis import ContextParallel
from trainer.moe.axis import ExpertParallel
from trainer.tensor_parallel.collectives import TensorParallel

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.mesh import ParallelMesh, ProcessGroups


@dataclass(frozen=True)
class ParallelAxes:
    """The axes along which one layer is divided; each of size 1 where it is not."""

    tp: TensorParallel = field(default_factory=TensorParallel)
    cp: ContextParallel = field(default_factory=ContextParallel)
    ep: ExpertParallel = field(default_factory=ExpertParallel)

    @classmethod
    def build(cls, config: TrainConfig, mesh: ParallelMesh, groups: ProcessGroups) -> ParallelAxes:
        """The axes of ``mesh``."""
        return cls(
            TensorParallel.build(mesh, groups, config.parallel.sequence_parallel),
            ContextParallel.build(mesh, groups, config.parallel.cp_comm_type),
            ExpertParallel.build(mesh, groups),
        )
