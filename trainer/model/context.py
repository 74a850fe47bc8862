"""Context of a layer: the axes that divide the layer, and the current micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.model.context_parallel.axis import ContextParallel
from trainer.model.tensor_parallel.collectives import TensorParallel

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.data.samples.document_places import Documents
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups
    from trainer.distributed.random_streams import MicroBatchRandomness
    from trainer.model.cache import KeyValueCache
    from trainer.model.linear_bias import LinearBias
    from trainer.model.rotary import RotaryTable


@dataclass(frozen=True)
class ExpertParallel:
    """The ep axis as layers see it.

    Rank i holds the i-th part of each layer's experts.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None when size is 1."""
    shares: int = 1
    """Parts of the tokens that different tp ranks bring to the experts."""

    @classmethod
    def build(cls, mesh: ParallelMesh, groups: ProcessGroups) -> ExpertParallel:
        """The ep axis of ``mesh``."""
        return cls(mesh.ep, mesh.ep_rank, groups.ep, mesh.expert_shares)


@dataclass(frozen=True)
class ParallelAxes:
    """The axes along which one layer is divided.

    An axis that does not divide the layer has size 1.
    """

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


@dataclass(frozen=True)
class ForwardPass:
    """One pass of a micro-batch through the layers of a rank.

    Attributes:
        rotary: angles of this rank's positions; None without rotary embedding.
        rotary_local: the same in layers with a sliding window; None: as in the others.
        key_mask: bool [B, S], True for tokens that attention sees; None: all tokens.
        documents: bounds of the documents, if attention must not cross them.
        randomness: the random streams of dropout; None disables dropout.
        aux_loss_scale: derivative of the minimised loss with respect to an auxiliary loss of this micro-batch: a layer
            multiplies the gradient of its auxiliary loss by this factor. 0 without a backward.
        limits_experts: full experts drop tokens, if the model has a capacity limit; only in training.
        cache: keys and values of earlier tokens, in generation; None without.
        linear_bias: channels of ALiBi at this rank's positions; None without.
    """

    rotary: RotaryTable | None = None
    documents: Documents | None = None
    randomness: MicroBatchRandomness | None = None
    aux_loss_scale: float = 0.0
    limits_experts: bool = True
    rotary_local: RotaryTable | None = None
    key_mask: torch.Tensor | None = None
    cache: KeyValueCache | None = None
    linear_bias: LinearBias | None = None

    def rotary_of(self, *, has_window: bool) -> RotaryTable | None:
        """Angles of a layer with or without a sliding window."""
        return self.rotary_local if has_window and self.rotary_local is not None else self.rotary
