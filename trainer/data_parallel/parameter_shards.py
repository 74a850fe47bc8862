"""Parameter shards, and the gradient store: the same interface for every ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh
    from trainer.model.sharding import ParameterLayout


@dataclass
class StoredShard:
    """The contiguous range of a flattened tensor of the model that this rank reads from checkpoints.

    Attributes:
        name: global name of the tensor.
        start: position of the first element in the rank's flattened part (ParameterLayout.boxes).
        weight: 1-D, receives the values.
    """

    name: str
    start: int
    weight: Tensor

    @property
    def stop(self) -> int:
        """Position after the last element."""
        return self.start + self.weight.numel()


@dataclass
class ParameterShard(StoredShard):
    """The contiguous range of a flattened parameter that this rank updates.

    Attributes:
        weight: 1-D, receives the new values; in the model's dtype, or float32 if the store itself keeps masters.
        gradient: float32 or bfloat16, 1-D, of equal length; final after ``finish``, until the next ``begin``.
    """

    gradient: Tensor


class GradientStore(Protocol):
    """Main gradients of one rank.

    Backward fills them, and the ranks that share a parameter sum them.

    One iteration: ``begin``; forward and backward of every micro-batch, with ``expect_last_backward`` before the last
    backward of each chunk; ``finish``; the optimizer writes into the weights of the shards; ``weights_changed``.
    The store sums and never averages: the loss was divided by the number of valid tokens of the whole batch before
    backward, so that every sum is already the gradient.
    """

    parameter_shards: list[ParameterShard]
    """Shards that this rank updates: one of each parameter of which it has any element. Their objects never change."""
    is_sharded: bool
    """True if the ranks with copies of a parameter hold disjoint shards of it; else each rank holds all of it."""

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """Connect the parameters of this rank's chunks to their gradients; once, before any backward."""

    def begin(self, num_micro_batches: int) -> None:
        """Start an iteration that runs ``num_micro_batches`` through every chunk."""

    def expect_last_backward(self, chunk: int) -> None:
        """Announce that the next backward through ``chunk`` is its last of this iteration."""

    def finish(self) -> None:
        """Make the gradients of all shards final. Collective: all ranks, after their last backward."""

    def weights_changed(self) -> None:
        """Send the shards' new weights to the ranks that hold copies.

        The weights arrive now or before their next use.

        Collective: all ranks.
        """

    def wait_for_weights(self) -> None:
        """Wait until all parameters of this rank hold their new values. Collective: all ranks."""


def is_first_copy(layout: ParameterLayout, mesh: ParallelMesh, is_sharded: bool) -> bool:
    """True if no earlier rank along dp and cp holds the same elements.

    Together with ``ParameterLayout.owned_ranges`` this gives every element of the model to exactly one rank of the job:
    that rank counts it in the norm and writes it to checkpoints.
    """
    return is_sharded or mesh.copy_rank(layout.is_expert) == 0
