"""Further numbers of a row of metrics.jsonl, on request and at an interval.

Every number is that of the whole model, the same in every layout up to rounding. Without a request nothing is computed
and no message is sent; at an iteration that has numbers, one sum over all ranks gives all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.optimizer.layer_sums import LayerSums

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.sections.logging import LoggingConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel


class StepNumbers:
    """Norms of parameters and gradients, and zeros in the gradient, of the iterations that have them.

    - ``params_norm``: 2-norm of all parameters after the step, as Megatron-LM's calc_params_l2_norm
      (megatron/training/utils/common_utils.py): of the float32 masters where the weights have 16 bits. A tied table
      counts once; expert biases, which the optimizer does not see, do not count.
    - ``num_zeros_in_grad``: elements of the gradient that are exactly 0, as Megatron-LM's count_zeros_fp32
      (megatron/core/optimizer/clip_grads.py). Vocabulary padding, which depends on the layout, does not count.
    - ``layer_params_norms`` and ``layer_grad_norms``: the same norm, and the norm of the gradient before clipping and
      without the loss scale, of each layer. A norm that is not finite is None.
    """

    def __init__(self, config: LoggingConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> None:
        """Prepare what ``config`` requests. Collective: all ranks of the job, if anything is requested."""
        self._config, self._optimizer = config, optimizer
        self._interval = config.numbers_interval or config.log_interval or 1
        is_asked = config.log_params_norm or config.log_num_zeros_in_grad or config.log_layer_norms
        self._sums = LayerSums(model) if is_asked else None
        self._has_peers = model.mesh.world_size > 1
        self._of_gradients: list[Tensor] = []

    def read_gradients(self, iteration: int) -> None:
        """Read the final gradients of ``iteration``, before the step overwrites them. No communication."""
        self._of_gradients = []
        if self._sums is None or iteration % self._interval:
            return
        if self._config.log_num_zeros_in_grad:
            self._of_gradients.append(self._sums.zeros())
        if self._config.log_layer_norms:
            self._of_gradients.append(self._sums.gradient_squares())

    def row(self, iteration: int, loss_scale: float) -> dict[str, Any]:
        """The numbers of ``iteration`` after its step; empty without any.

        Collective: all ranks of the job, if the iteration has numbers.

        Args:
            iteration: as in ``read_gradients``.
            loss_scale: factor of its gradients.
        """
        if self._sums is None or iteration % self._interval:
            return {}
        config, layers = self._config, self._sums.layers
        parts = list(self._of_gradients)
        if config.log_params_norm or config.log_layer_norms:
            parts.append(self._sums.squares(self._optimizer.masters))
        totals = torch.cat(parts)
        if self._has_peers:
            dist.all_reduce(totals)
        values = totals.tolist()
        row: dict[str, Any] = {}
        if config.log_num_zeros_in_grad:
            row["num_zeros_in_grad"] = int(values.pop(0))
        if config.log_params_norm:
            row["params_norm"] = _root(sum(values[-len(layers) :]))
        if config.log_layer_norms:
            row["layer_grad_norms"] = dict(zip(layers, [_root(v, loss_scale) for v in values], strict=False))
            row["layer_params_norms"] = dict(zip(layers, map(_root, values[len(layers) :]), strict=True))
        return row


def _root(square: float, divisor: float = 1.0) -> float | None:
    return math.sqrt(square) / divisor if math.isfinite(square) else None
