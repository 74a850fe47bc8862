"""The optimizer step: 16- or 32-bit weights, fp32 masters and moments, clipping and unscaling folded into one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.optimizer.clipping import GradientNorm, clip_divisor
from trainer.optimizer.loss_scaler import LossScaler

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig, TrainConfig
    from trainer.train_state import ParallelModel


@dataclass(frozen=True)
class StepOutcome:
    """What became of one step.

    Attributes:
        grad_norm: norm of the whole model's gradient before clipping, without the loss scale; None if not finite.
        skipped: the gradient was not finite and the weights are as before.
    """

    grad_norm: float | None
    skipped: bool


class MixedPrecisionOptimizer:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) or SGD with momentum over the model's main gradients.

    The masters of 32-bit weights are the weights themselves. Biases and norms do not decay. torch's fused kernels do
    the arithmetic; their ``grad_scale`` divides by loss scale and clipping in the same pass over memory.

    Attributes:
        loss_scaler: what the loss is multiplied by before backward.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel) -> None:
        """Allocate masters and moments for what this rank updates."""
        self.loss_scaler = LossScaler.build(config.training)
        self._model = model
        self._clip_grad = config.optimizer.clip_grad
        self._norm = GradientNorm(model)
        self._masters: dict[str, nn.Parameter] = {}
        self._pieces = {piece.name: piece for piece in model.gradients.pieces}
        for name, piece in self._pieces.items():
            # An alias for fp32, a copy else. A parameter of its own, since the model's .grad belongs to backward.
            self._masters[name] = nn.Parameter(piece.weight.to(torch.float32))
        self._optimizer = _build(config.optimizer, self._masters, model)
        self._moments = _moment_names(config.optimizer)
        for master in self._masters.values():
            state = self._optimizer.state[master]
            for moment in self._moments:
                state[moment] = torch.zeros_like(master, memory_format=torch.preserve_format)
            if config.optimizer.optimizer == "adam":
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        self._steps = 0

    def step(self, lr: float) -> StepOutcome:
        """Update the weights from the main gradients, unless they are not finite.

        Collective: all ranks, with final gradients that still carry the loss scale. The main gradients are no longer
        meaningful afterwards.
        """
        scale = self.loss_scaler.scale
        scaled_norm = self._norm.measure()
        is_finite = math.isfinite(scaled_norm)
        self.loss_scaler.update(overflow=not is_finite)
        if not is_finite:
            return StepOutcome(grad_norm=None, skipped=True)
        norm = scaled_norm / scale
        self._apply(lr, scale * clip_divisor(norm, self._clip_grad))
        return StepOutcome(grad_norm=norm, skipped=False)

    @torch.no_grad()
    def _apply(self, lr: float, divisor: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        device = next(iter(self._masters.values())).device
        grad_scale = None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32, device=device)
        for name, master in self._masters.items():
            master.grad = self._pieces[name].gradient
        self._optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        self._optimizer.step()
        self._steps += 1
        self._publish()

    def _publish(self) -> None:
        """Bring what the masters hold to the weights of all ranks."""
        pairs = [(self._pieces[name].weight, master.detach()) for name, master in self._masters.items()]
        low = [(weight, master) for weight, master in pairs if weight.dtype != master.dtype]
        if low:
            torch._foreach_copy_([weight for weight, _ in low], [master for _, master in low])
        self._model.gradients.weights_changed()

    @property
    def steps(self) -> int:
        """Steps that changed the weights: Adam's bias correction and the learning rate count these."""
        return self._steps

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint must hold beside the weights: kind -> global name -> 1-D, the state of this rank's piece.

        They are live views. Kinds are ``master`` (16-bit training only) and the optimizer's moments.
        """
        kinds = {
            moment: {name: self._optimizer.state[master][moment] for name, master in self._masters.items()}
            for moment in self._moments
        }
        low = {
            name: master.detach()
            for name, master in self._masters.items()
            if self._pieces[name].weight.dtype != master.dtype
        }
        return {"master": low, **kinds} if low else kinds

    def restore(self, steps: int, loss_scaler: Mapping[str, float | int | None] | None) -> None:
        """Finish a resume: counters, after the tensors of ``tensors()`` were filled in place.

        The weights follow the masters. Collective: all ranks.
        """
        self._steps = steps
        for master in self._masters.values():
            state = self._optimizer.state[master]
            if "step" in state:
                state["step"].fill_(float(steps))
        if loss_scaler is not None:
            self.loss_scaler.load(loss_scaler)
        with torch.no_grad():
            self._publish()

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Make the masters follow the weights, after weights alone were loaded."""
        for name, master in self._masters.items():
            if self._pieces[name].weight.dtype != master.dtype:
                master.copy_(self._pieces[name].weight)


def _build(config: OptimizerConfig, masters: Mapping[str, nn.Parameter], model: ParallelModel) -> torch.optim.Optimizer:
    decayed = [master for name, master in masters.items() if model.layouts[name].decay]
    free = [master for name, master in masters.items() if not model.layouts[name].decay]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (free, 0.0))
        if parameters
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def _moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()
