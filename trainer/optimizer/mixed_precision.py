"""The mixed-precision optimizer step over float32 masters and moments.

Unscaling and clipping take no separate pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.optimizer.clipping import GradientNorm, clip_divisor
from trainer.optimizer.cpu_offload import OffloadedMasters, offloaded_shards
from trainer.optimizer.loss_scaler import LossScaler
from trainer.optimizer.masters import Masters, Traits, new_moments

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.parallel_model import ParallelModel


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step.

    Attributes:
        grad_norm: norm of the whole model's gradient before clipping, without the loss scale; None if not finite.
        skipped: the gradient was not finite, and the weights are unchanged.
    """

    grad_norm: float | None
    skipped: bool


class MixedPrecisionOptimizer:
    """AdamW or SGD with momentum over the model's main gradients.

    The masters of 32-bit weights are the weights themselves, unless they are offloaded to CPU memory. Weight decay
    skips biases and norms.

    Attributes:
        loss_scaler: scales the loss before backward.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel) -> None:
        """Allocate masters and moments of this rank's parameter shards."""
        self.loss_scaler = LossScaler.build(config.training)
        self._model = model
        self._clip_grad = config.optimizer.clip_grad
        self._norm = GradientNorm(model)
        parameter_shards = model.gradients.parameter_shards
        has_own = config.optimizer.decoupled_lr is not None
        layouts = [model.layouts[shard.name] for shard in parameter_shards]
        traits = {one.name: Traits(one.decay, has_own and one.is_vocabulary_table) for one in layouts}
        fraction = config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0
        away = offloaded_shards(parameter_shards, fraction)
        self._offloaded = OffloadedMasters(config.optimizer, away, traits, model.kernels.in_cpu_memory)
        names = self._offloaded.masters.keys()
        self._resident = {shard.name: shard for shard in parameter_shards if shard.name not in names}
        # An alias of float32 weights, a copy of others.
        self._masters = {name: shard.weight.detach().to(torch.float32) for name, shard in self._resident.items()}
        self._moments = new_moments(config.optimizer, self._masters)
        copies = {name: shard.weight.detach() for name, shard in self._resident.items()}
        low = {name: weight for name, weight in copies.items() if weight.dtype != torch.float32}
        self._step = Masters(config.optimizer, self._masters, self._moments, traits, model.kernels, low)
        self._steps = 0

    def step(self, lr: float) -> StepOutcome:
        """Update the weights from the main gradients, unless they are not finite.

        Collective: all ranks, with final gradients that still carry the loss scale. The main gradients are invalid
        afterwards.
        """
        scale = self.loss_scaler.scale
        scaled_norm = self._norm.measure()
        is_finite = math.isfinite(scaled_norm)
        self.loss_scaler.update(overflow=not is_finite)
        if not is_finite:
            return StepOutcome(grad_norm=None, skipped=True)
        norm = scaled_norm / scale
        divisor = scale * clip_divisor(norm, self._clip_grad)
        self._offloaded.begin_step()
        # On a CUDA device this step runs while the CPU steps the offloaded shards.
        self._step.step(lr, divisor, {name: shard.gradient for name, shard in self._resident.items()})
        self._offloaded.step(lr, divisor)
        self._steps += 1
        self._model.gradients.weights_changed()
        return StepOutcome(grad_norm=norm, skipped=False)

    def set_weight_decay(self, weight_decay: float) -> None:
        """Use ``weight_decay`` from the next step on, where weight decay applies."""
        self._step.set_weight_decay(weight_decay)
        self._offloaded.set_weight_decay(weight_decay)

    def set_decoupled_lr(self, lr: float) -> None:
        """Use ``lr`` for the word embeddings and the output layer from the next step on, with a decoupled_lr."""
        self._step.set_decoupled_lr(lr)
        self._offloaded.set_decoupled_lr(lr)

    @torch.no_grad()
    def _publish_resident(self) -> None:
        pairs = [(shard.weight, self._masters[name]) for name, shard in self._resident.items()]
        low = [(weight, master) for weight, master in pairs if weight.dtype != master.dtype]
        if low:
            torch._foreach_copy_([weight for weight, _ in low], [master for _, master in low])

    @property
    def steps(self) -> int:
        """Number of steps that changed the weights.

        Adam's bias correction and the learning rate count these.
        """
        return self._steps

    @property
    def masters(self) -> dict[str, Tensor]:
        """Live float32 weights of this rank's shards, 1-D by name; some in CPU memory under offloading."""
        return self._of_all(self._masters, self._offloaded.masters)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state for a checkpoint: kind -> global name -> 1-D state.

        The state is that of this rank's parameter shards.

        The tensors are live views, some in CPU memory under offloading. Kinds are ``master`` (16-bit training only) and
        the optimizer's moments, the same on all ranks, including those without shards.
        """
        kinds = {kind: self._of_all(named, self._offloaded.moments[kind]) for kind, named in self._moments.items()}
        if all(parameter.dtype == torch.float32 for parameter in self._model.parameters.values()):
            return kinds
        masters = self.masters
        dtypes = {shard.name: shard.weight.dtype for shard in self._model.gradients.parameter_shards}
        return {"master": {name: masters[name] for name in masters if dtypes[name] != torch.float32}, **kinds}

    def _of_all(self, resident: Mapping[str, Tensor], offloaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        both = {**resident, **offloaded}
        return {shard.name: both[shard.name] for shard in self._model.gradients.parameter_shards}

    @torch.no_grad()
    def restore(self, steps: int, loss_scaler: Mapping[str, float | int | None] | None) -> None:
        """Finish a resume after weights and ``tensors()`` were filled in place.

        Sets the counters and copies the masters to the 16-bit weights. Collective: all ranks.
        """
        self._steps = steps
        self._step.set_steps(steps)
        self._offloaded.set_steps(steps)
        if loss_scaler is not None:
            self.loss_scaler.load(loss_scaler)
        self._publish_resident()
        self._offloaded.restore_masters()
        self._model.gradients.weights_changed()

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Copy the weights into the masters, after a load of weights alone."""
        for name, shard in self._resident.items():
            if shard.weight.dtype != torch.float32:
                self._masters[name].copy_(shard.weight)
        self._offloaded.adopt_weights()
