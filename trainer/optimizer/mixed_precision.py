"""The mixed-precision optimizer step over float32 masters and moments.

Unscaling and clipping take no separate pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.config.sections.scales import width_ratio
from trainer.optimizer.clipping import GradientNorm, clip_divisor
from trainer.optimizer.cpu_offload import OffloadedMasters, offloaded_shards
from trainer.optimizer.loss_scaler import LossScaler
from trainer.optimizer.masters import Masters, Traits, new_moments
from trainer.optimizer.split_master import Master, SplitMaster

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.parallel_model import ParallelModel


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step.

    Attributes:
        grad_norm: norm of the whole model's gradient before clipping, without the loss scale; None if not finite.
        skipped: the gradient was not finite, or the step was held back; the weights are unchanged.
        held: the step was held back, whatever its gradient.
    """

    grad_norm: float | None
    skipped: bool
    held: bool = False


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device makes, of which the host does not know yet whether it changes the weights.

    Attributes:
        norm: float64 [] on the device: norm of the whole model's gradient, with the loss scale.
        held: see StepOutcome.
    """

    norm: Tensor
    held: bool = False


class MixedPrecisionOptimizer:
    """AdamW or SGD with momentum over the model's main gradients.

    The masters of 32-bit weights are the weights themselves, unless they are offloaded to CPU memory. Those of bfloat16
    weights may be kept as remainders of the weights. Weight decay skips biases and norms.

    Attributes:
        loss_scaler: scales the loss before backward.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel) -> None:
        """Allocate masters and moments of this rank's parameter shards."""
        self.loss_scaler = LossScaler.build(config.training)
        self._model = model
        self._clip_grad = config.optimizer.clip_grad
        self._norm = GradientNorm(model)
        is_on_gpu = next(iter(model.parameters.values())).is_cuda
        self._runs_ahead = is_on_gpu and not config.optimizer.optimizer_cpu_offload
        parameter_shards = model.gradients.parameter_shards
        has_own = config.optimizer.decoupled_lr is not None
        traits = {
            one.name: Traits(
                one.decay, has_own and one.is_vocabulary_table, _factor(config, is_hidden=one.is_hidden_matrix)
            )
            for one in (model.layouts[shard.name] for shard in parameter_shards)
        }
        fraction = config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0
        away = offloaded_shards(parameter_shards, fraction)
        self._offloaded = OffloadedMasters(config.optimizer, away, traits, model.kernels.in_cpu_memory)
        names = self._offloaded.masters.keys()
        self._resident = {shard.name: shard for shard in parameter_shards if shard.name not in names}
        weights = {name: shard.weight.detach() for name, shard in self._resident.items()}
        low = {name: weight for name, weight in weights.items() if weight.dtype != torch.float32}
        self._split: dict[str, SplitMaster] = {}
        if config.optimizer.store_param_remainders:
            split = {name: torch.zeros_like(weight, dtype=torch.int16) for name, weight in low.items()}
            self._split = {name: SplitMaster(low[name], remainder) for name, remainder in split.items()}
        # An alias of float32 weights, remainders if they are kept, else a copy.
        self._masters = {
            name: self._split[name].remainder if name in self._split else weight.to(torch.float32)
            for name, weight in weights.items()
        }
        self._moments = new_moments(config.optimizer, self._masters)
        self._step = Masters(config.optimizer, self._masters, self._moments, traits, model.kernels, low)
        self._steps = 0
        self._readers: list[Callable[[], None]] = []

    def call_before_change(self, reader: Callable[[], None]) -> None:
        """Call ``reader`` once, when the gradients of the next step are final, or before a load.

        Weights and state may change when it returns, by this step or by a function of the user's after it.
        """
        self._readers.append(reader)

    def _wait_for_readers(self) -> None:
        while self._readers:
            self._readers.pop()()

    def step(self, lr: float) -> StepOutcome:
        """``launch`` a step, and wait for its outcome."""
        launched = self.launch(lr)
        return self.finish(launched, float(launched.norm))

    def launch(self, lr: float) -> LaunchedStep:
        """Update the weights from the main gradients, unless they are not finite; ``finish`` must follow.

        On a GPU the host does not wait: norm, divisor and the decision stay there, so that the GPU goes from backward
        to the update at once. With offloading the CPU needs the divisor, and waits for the norm first.

        Collective: all ranks, with final gradients that still carry the loss scale. The main gradients are invalid
        afterwards.
        """
        norm, scale = self._norm.measure(), self.loss_scaler.scale
        divisor: float | Tensor = scale * clip_divisor(norm / scale, self._clip_grad)
        self._wait_for_readers()
        if not self._runs_ahead:
            if not math.isfinite(float(norm)):
                return LaunchedStep(norm)
            divisor = float(divisor)
        self._offloaded.begin_step()
        # On a CUDA device this step runs while the CPU steps the offloaded shards.
        self._step.step(lr, divisor, {name: shard.gradient for name, shard in self._resident.items()})
        if isinstance(divisor, float):
            self._offloaded.step(lr, divisor)
        # Of a step that changes nothing, the ranks send each other the old weights.
        self._model.gradients.weights_changed()
        return LaunchedStep(norm)

    def finish(self, launched: LaunchedStep, scaled_norm: float) -> StepOutcome:
        """Count the step, or adapt the loss scale to its overflow. ``scaled_norm``: the value of its norm."""
        scale = self.loss_scaler.scale
        is_finite = math.isfinite(scaled_norm)
        norm = scaled_norm / scale if is_finite else None
        if launched.held:
            return StepOutcome(grad_norm=norm, skipped=True, held=True)
        self.loss_scaler.update(overflow=not is_finite)
        if is_finite:
            self._steps += 1
        else:
            # The masters have counted the step.
            self._step.set_steps(self._steps)
        return StepOutcome(grad_norm=norm, skipped=not is_finite)

    def hold_back(self) -> LaunchedStep:
        """Leave weights and loss scale as they are, and only measure the gradient. Otherwise as ``launch``."""
        norm = self._norm.measure()
        self._wait_for_readers()
        return LaunchedStep(norm, held=True)

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
        # Split masters share the weights.
        low = [(weight, master) for weight, master in pairs if weight.dtype != master.dtype == torch.float32]
        if low:
            torch._foreach_copy_([weight for weight, _ in low], [master for _, master in low])

    @property
    def steps(self) -> int:
        """Number of steps that changed the weights.

        Adam's bias correction and the learning rate count these.
        """
        return self._steps

    @property
    def masters(self) -> dict[str, Master]:
        """Live float32 weights of this rank's shards, 1-D by name; some in CPU memory under offloading."""
        return self._of_all({**self._masters, **self._split}, self._offloaded.masters)

    def tensors(self) -> dict[str, dict[str, Master]]:
        """Optimizer state for a checkpoint: kind -> global name -> 1-D state.

        The state is that of this rank's parameter shards.

        All are live views, some in CPU memory under offloading; masters may be split. Kinds are ``master`` (16-bit
        training only) and the optimizer's moments, the same on all ranks, including those without shards.
        """
        kinds = {kind: self._of_all(named, self._offloaded.moments[kind]) for kind, named in self._moments.items()}
        if all(parameter.dtype == torch.float32 for parameter in self._model.parameters.values()):
            return kinds
        masters = self.masters
        dtypes = {shard.name: shard.weight.dtype for shard in self._model.gradients.parameter_shards}
        return {"master": {name: masters[name] for name in masters if dtypes[name] != torch.float32}, **kinds}

    def _of_all(self, resident: Mapping[str, Master], offloaded: Mapping[str, Tensor]) -> dict[str, Master]:
        both: dict[str, Master] = {**resident, **offloaded}
        return {shard.name: both[shard.name] for shard in self._model.gradients.parameter_shards}

    @torch.no_grad()
    def restore(self, steps: int, loss_scaler: Mapping[str, float | int | None] | None) -> None:
        """Finish a resume after weights and ``tensors()`` were filled in place.

        Sets the counters and copies the masters to the 16-bit weights. Collective: all ranks.
        """
        self._wait_for_readers()
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
        """Make the weights the masters, after a load of weights alone."""
        self._wait_for_readers()
        for name, shard in self._resident.items():
            if name in self._split:
                self._masters[name].zero_()
            elif shard.weight.dtype != torch.float32:
                self._masters[name].copy_(shard.weight)
        self._offloaded.adopt_weights()


def _factor(config: TrainConfig, *, is_hidden: bool) -> float:
    """Factor of a parameter's rate: Yang et al. 2022 (arXiv:2203.03466), table 8. ``is_hidden``: see its layout."""
    ratio = width_ratio(config.model)
    if config.optimizer.optimizer == "sgd":
        return 1.0 if is_hidden else ratio
    return 1.0 / ratio if is_hidden else 1.0
