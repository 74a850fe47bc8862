"""What a rank updates of the model, whatever way the training state is divided over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh
    from trainer.model.sharding import ParameterLayout


@dataclass
class ParameterShard:
    """The stretch of one parameter that this rank updates: of its flattened part, from ``start`` on.

    Attributes:
        name: global name of the parameter.
        start: position of the first element in the flattened part of this rank (ParameterLayout.boxes).
        weight: 1-D, where new values go; in the model's dtype, or float32 where the store keeps masters itself.
        gradient: float32, 1-D, as long; final after ``finish``, until the next ``begin``.
    """

    name: str
    start: int
    weight: Tensor
    gradient: Tensor

    @property
    def stop(self) -> int:
        """Position after the last element."""
        return self.start + self.weight.numel()


class GradientStore(Protocol):
    """Main gradients of one rank: filled by backward, summed over the ranks that share a parameter.

    One iteration: ``begin``; forward and backward of every micro-batch, with ``expect_last_backward`` before the last
    backward of each chunk; ``finish``; the optimizer writes into the pieces' weights; ``weights_changed``.
    Nothing here averages: the loss was divided by the number of valid tokens of the whole batch before backward, so
    every sum is already the gradient.
    """

    parameter_shards: list[ParameterShard]
    """What this rank updates: one piece of each parameter that it has any of, the same objects for ever."""
    is_sharded: bool
    """Whether the ranks with copies of a parameter hold disjoint pieces of it; else each holds all of it."""

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """Make the parameters of this rank's chunks leave their gradients here; once, before any backward."""

    def begin(self, num_micro_batches: int) -> None:
        """Start an iteration that runs so many micro-batches through every chunk."""

    def expect_last_backward(self, chunk: int) -> None:
        """The backward that comes next is the last of this iteration through ``chunk``."""

    def finish(self) -> None:
        """Make the gradients of all pieces final. Collective: all ranks, after their last backward."""

    def weights_changed(self) -> None:
        """The weights of the pieces are new: bring them to the ranks that hold copies, now or before they are used.

        Collective: all ranks.
        """

    def wait_for_weights(self) -> None:
        """Return when every parameter of this rank holds its new values, all of them. Collective: all ranks."""


def speaks_for_copies(layout: ParameterLayout, mesh: ParallelMesh, is_sharded: bool) -> bool:
    """Whether what this rank holds of a parameter is held by no rank before it along dp and cp.

    With ``ParameterLayout.owned_ranges`` it makes every element of the model belong to exactly one rank of the job:
    that rank counts it in the norm and writes it to checkpoints.
    """
    return is_sharded or mesh.copy_rank(layout.is_expert) == 0
