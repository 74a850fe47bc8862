"""Further numbers of a row of metrics.jsonl, on request and at an interval.

Every number is that of the whole model, the same in every layout up to rounding. Without a request nothing is computed
and no message is sent; at an iteration that has numbers, one sum over all ranks gives all of them.

Legend: L layers of the whole model, E experts, N auxiliary losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.distributed.collectives import max_over_ranks
from trainer.optimizer.layer_sums import LayerSums, layer_of
from trainer.process.device import memory_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel


class StepNumbers:
    """Norms of parameters and gradients, zeros in the gradient, and numbers of routers.

    - ``params_norm``: 2-norm of all parameters after the step, as Megatron-LM's calc_params_l2_norm
      (megatron/training/utils/common_utils.py): of the float32 masters where the weights have 16 bits. A tied table
      counts once; expert biases, which the optimizer does not see, do not count.
    - ``num_zeros_in_grad``: elements of the gradient that are exactly 0, as Megatron-LM's count_zeros_fp32
      (megatron/core/optimizer/clip_grads.py). Vocabulary padding, which depends on the layout, does not count.
    - ``layer_params_norms`` and ``layer_grad_norms``: the same norm, and the norm of the gradient before clipping and
      without the loss scale, of each layer. A norm that is not finite is None.
    - ``moe_layers``: see ``router_row``.
    - ``memory_allocated_bytes`` and so on: the largest value of any rank.
    - ``batch_size`` and ``world_size``.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> None:
        """Prepare what ``config.logging`` requests. Collective: all ranks of the job, if anything is requested."""
        self._config, self._model, self._optimizer = config.logging, model, optimizer
        asked = config.logging
        self._interval = asked.numbers_interval or asked.log_interval or 1
        self._num_experts = config.model.num_experts or 0
        self._routers = model.router_numbers if asked.moe_per_layer_logging else []
        for router in self._routers:
            router.counts_load = True
        has_routers = asked.moe_per_layer_logging and self._num_experts > 0
        is_asked = asked.log_params_norm or asked.log_num_zeros_in_grad or asked.log_layer_norms or has_routers
        self._sums = LayerSums(model) if is_asked else None
        self._parts: dict[str, Tensor] = {}

    def read(self, iteration: int) -> None:
        """Read what the step of ``iteration`` overwrites: the final gradients, and numbers of routers.

        No communication.
        """
        asked, sums = self._config, self._sums
        self._parts = {}
        if sums is None:
            return
        if not iteration % self._interval:
            if asked.log_num_zeros_in_grad:
                self._parts["zeros"] = sums.zeros()
            if asked.log_layer_norms:
                self._parts["gradients"] = sums.gradient_squares()
            if asked.moe_per_layer_logging and self._num_experts:
                self._parts["routers"] = self._of_routers(sums)
        for router in self._routers:
            router.load.zero_()

    def _of_routers(self, sums: LayerSums) -> Tensor:
        """This rank's share of the sums of RouterNumbers, [L, N + 1 + E]."""
        width = len(self._model.auxiliary_losses) + 1 + self._num_experts
        found = sums.empty(width)
        # All tp ranks have the same numbers.
        if self._model.mesh.tp_rank == 0:
            for router in self._routers:
                found[sums.places[layer_of(router.name)]] = torch.cat([router.losses, router.load.double()])
        return found

    def row(self, iteration: int, loss_scale: float, samples: int) -> dict[str, Any]:
        """The numbers of ``iteration`` after its step; empty without any.

        Collective: all ranks of the job, if the iteration has numbers.

        Args:
            iteration: as in ``read``.
            loss_scale: factor of its gradients.
            samples: size of its batch.
        """
        if iteration % self._interval:
            return {}
        row = self._of_job(samples)
        if self._sums is not None:
            row |= self._of_model(self._sums, loss_scale)
        return row

    def _of_job(self, samples: int) -> dict[str, int]:
        """Memory and sizes. Collective: all ranks, for the memory."""
        row = {}
        if self._config.log_memory:
            device = next(iter(self._model.parameters.values())).device
            own = memory_bytes(device)
            largest = max_over_ranks([float(value) for value in own.values()], device)
            row = {name: int(value) for name, value in zip(own, largest, strict=True)}
        if self._config.log_batch_size:
            row["batch_size"] = samples
        if self._config.log_world_size:
            row["world_size"] = self._model.mesh.world_size
        return row

    def _of_model(self, sums: LayerSums, loss_scale: float) -> dict[str, Any]:
        """Numbers that are sums over the elements of the model. Collective: all ranks."""
        asked = self._config
        if asked.log_params_norm or asked.log_layer_norms:
            self._parts["parameters"] = sums.squares(self._optimizer.masters)
        totals = self._totals()
        row: dict[str, Any] = {}
        if asked.log_num_zeros_in_grad:
            row["num_zeros_in_grad"] = int(totals["zeros"][0])
        if asked.log_params_norm:
            row["params_norm"] = _root(sum(totals["parameters"]))
        if asked.log_layer_norms:
            norms = [_root(square, loss_scale) for square in totals["gradients"]]
            row["layer_params_norms"] = dict(zip(sums.layers, map(_root, totals["parameters"]), strict=True))
            row["layer_grad_norms"] = dict(zip(sums.layers, norms, strict=True))
        if "routers" in totals:
            values = totals["routers"]
            width = len(values) // len(sums.layers)
            rows = [values[start : start + width] for start in range(0, len(values), width)]
            found = zip(sums.layers, (router_row(self._model.auxiliary_losses, one) for one in rows), strict=True)
            row["moe_layers"] = {layer: numbers for layer, numbers in found if numbers}
        return row

    def _totals(self) -> dict[str, list[float]]:
        """The parts summed over all ranks, flattened. Collective: all ranks."""
        packed = torch.cat([part.flatten() for part in self._parts.values()])
        if self._model.mesh.world_size > 1:
            dist.all_reduce(packed)
        values, totals = packed.tolist(), {}
        for name, part in self._parts.items():
            totals[name], values = values[: part.numel()], values[part.numel() :]
        return totals


def router_row(names: Sequence[str], sums: Sequence[float]) -> dict[str, float | None]:
    """The numbers of one layer with experts in a row; empty for another layer.

    - The auxiliary losses without their coefficients, means over the micro-batches of the iteration; None if not
      finite.
    - ``load_max_over_mean``: choices of the expert with most of them, over the mean; 1 if all have the same.
    - ``load_entropy``: entropy of the experts' shares over the largest possible one: 1 if all have the same share, 0 if
      one has all. Choices count before any is dropped.

    Args:
        names: of the auxiliary losses.
        sums: of each loss, of micro-batches, and of the choices of each expert, over all ranks.
    """
    losses, micro_batches, load = sums[: len(names)], sums[len(names)], sums[len(names) + 1 :]
    choices = sum(load)
    if not choices:
        return {}
    shares = [count / choices for count in load]
    entropy = -sum(share * math.log(share) for share in shares if share)
    return {
        **{
            name: loss / micro_batches if math.isfinite(loss) else None
            for name, loss in zip(names, losses, strict=True)
        },
        "load_max_over_mean": max(shares) * len(shares),
        "load_entropy": entropy / math.log(len(shares)) if len(shares) > 1 else 1.0,
    }


def _root(square: float, divisor: float = 1.0) -> float | None:
    return math.sqrt(square) / divisor if math.isfinite(square) else None
