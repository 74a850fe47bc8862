"""The gradient norm of the whole model, counting each parameter once, and clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.ops.tensor_lists import L2_NORM
from trainer.optimizer.layer_sums import owned_parts

if TYPE_CHECKING:
    from trainer.parallel_model import ParallelModel

# Megatron-LM's guard against a division by zero (clip_grad_by_total_norm_fp32), kept so that loss curves agree.
_NORM_EPSILON = 1e-6


class GradientNorm:
    """Computes the gradient norm over all parameters of a model with final main gradients."""

    def __init__(self, model: ParallelModel) -> None:
        """Keep a reference to the model."""
        self._model = model
        self._device = next(iter(model.parameters.values())).device

    def measure(self) -> Tensor:
        """The 2-norm, float64 [] on the device; not finite if any element is not. Does not wait for the device.

        Collective: all ranks of the job, with the same result.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients = {shard.name: shard.gradient for shard in self._model.gradients.parameter_shards}
        counted = [part for _, part in owned_parts(self._model, gradients)]
        if counted:
            squares = self._model.kernels[L2_NORM](counted)
        if self._model.mesh.world_size > 1:
            dist.all_reduce(squares)
        return squares.sqrt()


def clip_divisor(norm: Tensor, clip_grad: float) -> Tensor:
    """Divisor of all gradients that clips a norm above ``clip_grad``; NaN for a norm that is not finite.

    Smaller norms have divisor 1.
    """
    divisor = ((norm + _NORM_EPSILON) / clip_grad).clamp(min=1.0) if clip_grad > 0.0 else torch.ones_like(norm)
    return torch.where(norm.isfinite(), divisor, torch.nan)
