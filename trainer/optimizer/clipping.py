"""The gradient norm of the whole model, counting each parameter once, and clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data_parallel.parameter_shards import is_first_copy
from trainer.ops.tensor_lists import L2_NORM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.parallel_model import ParallelModel

# Megatron-LM's guard against a division by zero (clip_grad_by_total_norm_fp32), kept so that loss curves agree.
_NORM_EPSILON = 1e-6


class GradientNorm:
    """Computes the gradient norm over all parameters of a model with final main gradients."""

    def __init__(self, model: ParallelModel) -> None:
        """Keep a reference to the model."""
        self._model = model
        self._device = next(iter(model.parameters.values())).device

    def measure(self) -> float:
        """The 2-norm; not finite if any element is not.

        Collective: all ranks of the job, with the same result.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        counted = list(self._counted())
        if counted:
            squares = self._model.kernels[L2_NORM](counted)
        if self._model.mesh.world_size > 1:
            dist.all_reduce(squares)
        return float(squares.sqrt().item())

    def _counted(self) -> Iterator[Tensor]:
        """Gradients that this rank counts: exactly one rank counts each element of the model."""
        model = self._model
        for shard in model.gradients.parameter_shards:
            layout = model.layouts[shard.name]
            if not is_first_copy(layout, model.mesh, model.gradients.is_sharded):
                continue
            for start, stop in layout.owned_ranges(model.mesh, shard.start, shard.stop):
                yield shard.gradient[start - shard.start : stop - shard.start]


def clip_divisor(norm: float, clip_grad: float) -> float:
    """Divisor of all gradients that clips a norm above ``clip_grad``.

    Smaller norms have divisor 1.
    """
    if clip_grad <= 0.0:
        return 1.0
    return max(1.0, (norm + _NORM_EPSILON) / clip_grad)
