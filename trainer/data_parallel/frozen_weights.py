"""The store of a model that is only run: it has no gradients, and so no memory for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from torch import nn

from trainer.data_parallel.parameter_shards import ParameterShard

if TYPE_CHECKING:
    from trainer.config.sections.parallel import ParallelConfig
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups
    from trainer.model.sharding import ParameterLayout


class FrozenWeights:
    """This rank's parameters, whole. Implements trainer.data_parallel.parameter_shards.GradientStore."""

    is_sharded = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, ParameterLayout],
        mesh: ParallelMesh,
        groups: ProcessGroups,
        parallel: ParallelConfig,
    ) -> None:
        """Take ``parameters``, by global name; the rest is that of every store."""
        del layouts, mesh, groups, parallel
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        self.parameter_shards = [
            ParameterShard(name, 0, parameter.view(-1), parameter.new_empty(0))
            for name, parameter in parameters.items()
        ]

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """See GradientStore. Does nothing."""

    def begin(self, num_micro_batches: int) -> NoReturn:
        """See GradientStore.

        Raises:
            RuntimeError: always; the model cannot be trained.
        """
        raise RuntimeError(f"a model without gradients cannot be trained on {num_micro_batches} micro-batches")

    def expect_last_backward(self, chunk: int) -> None:
        """See GradientStore. Does nothing."""

    def finish(self) -> None:
        """See GradientStore. Does nothing."""

    def weights_changed(self) -> None:
        """See GradientStore. Does nothing: every rank reads its own weights."""

    def wait_for_weights(self) -> None:
        """See GradientStore. Returns at once."""
