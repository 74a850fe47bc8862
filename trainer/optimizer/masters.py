"""One optimizer step over float32 masters and their moments on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.ops.adamw import ADAMW, AdamWConstants

if TYPE_CHECKING:
    from trainer.config.sections.optimizer import OptimizerConfig
    from trainer.ops.dispatch.registry import Kernels

Moments = dict[str, dict[str, Tensor]]
"""Kind -> name -> 1-D, of the kind's dtype."""

_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Traits:
    """Treatment of one parameter.

    Attributes:
        decays: weight decay applies.
        is_decoupled: the rate is the decoupled one, not that of the other weights.
        factor: of the rate, unless it is decoupled, and of Adam's epsilon; see trainer.config.sections.scales.
    """

    decays: bool
    is_decoupled: bool = False
    factor: float = 1.0

    def rate(self, lr: float, decoupled_lr: float) -> float:
        """The learning rate of the parameter, from that of the config and the decoupled one."""
        return decoupled_lr if self.is_decoupled else lr * self.factor


class Masters:
    """Masters and moments, stepped by AdamW or SGD with momentum.

    AdamW: Loshchilov and Hutter 2019, algorithm 2.
    The division of the gradients by loss scale and clipping needs no separate pass over memory. The set of masters may
    be empty.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        masters: Mapping[str, Tensor],
        moments: Moments,
        traits: Mapping[str, Traits],
        kernels: Kernels,
        copies: Mapping[str, Tensor] = _NONE,
    ) -> None:
        """Take over the tensors without copying them.

        Args:
            config: the optimizer and its constants.
            masters: float32, or int16 remainders of their copies, 1-D, on one device, by any name.
            moments: of each kind in ``OptimizerConfig.moments``, shaped like the masters.
            traits: by name.
            kernels: the kernel registry.
            copies: 16-bit weights, all of one dtype, of some masters; each step also updates them.
        """
        self._step: _AdamW | _SGD
        if config.optimizer == "adam":
            self._step = _AdamW(config, masters, moments, traits, kernels, copies)
        else:
            self._step = _SGD(config, masters, moments, traits, copies)

    @torch.no_grad()
    def step(self, lr: float, divisor: float | Tensor, gradients: Mapping[str, Tensor]) -> None:
        """Update the masters from ``gradients / divisor``; the gradients are invalid afterwards.

        The divisor may be a float64 number [] on the device, which changes nothing if it is not finite. The step is
        counted even then; see ``set_steps``.
        """
        self._step.step(lr, divisor, gradients)

    def set_weight_decay(self, weight_decay: float) -> None:
        """Use ``weight_decay`` from the next step on."""
        self._step.set_weight_decay(weight_decay)

    def set_decoupled_lr(self, lr: float) -> None:
        """Use ``lr`` from the next step on, for masters whose rate is decoupled."""
        self._step.decoupled_lr = lr

    def set_steps(self, steps: int) -> None:
        """Continue after ``steps`` steps: Adam's bias correction counts them."""
        self._step.steps = steps


@dataclass(frozen=True)
class _Group:
    """Masters that one call steps."""

    names: Sequence[str]
    traits: Traits
    copies: Sequence[Tensor]


class _AdamW:
    def __init__(
        self,
        config: OptimizerConfig,
        masters: Mapping[str, Tensor],
        moments: Moments,
        traits: Mapping[str, Traits],
        kernels: Kernels,
        copies: Mapping[str, Tensor],
    ) -> None:
        self._config, self._masters, self._moments, self._kernels = config, masters, moments, kernels
        self.steps = 0
        self.decoupled_lr = config.decoupled_lr or config.lr
        self._weight_decay = config.weight_decay
        self._groups = []
        for kind in _kinds(masters, traits):
            for is_copied in (True, False):
                names = [name for name in masters if traits[name] == kind and (name in copies) == is_copied]
                if names:
                    weights = [copies[name] for name in names] if is_copied else []
                    self._groups.append(_Group(names, kind, weights))

    def set_weight_decay(self, weight_decay: float) -> None:
        self._weight_decay = weight_decay

    def step(self, lr: float, divisor: float | Tensor, gradients: Mapping[str, Tensor]) -> None:
        config = self._config
        self.steps += 1
        for group in self._groups:
            named = (self._masters, gradients, self._moments["exp_avg"], self._moments["exp_avg_sq"])
            masters, own, exp_avgs, exp_avg_sqs = ([tensors[name] for name in group.names] for tensors in named)
            decay = self._weight_decay if group.traits.decays else 0.0
            rate, eps = group.traits.rate(lr, self.decoupled_lr), config.adam_eps * group.traits.factor
            constants = AdamWConstants(rate, config.adam_beta1, config.adam_beta2, eps, decay, self.steps, divisor)
            self._kernels[ADAMW](masters, own, exp_avgs, exp_avg_sqs, group.copies, constants)


class _SGD:
    """torch's fused kernel; its ``grad_scale`` divides in the same pass."""

    def __init__(
        self,
        config: OptimizerConfig,
        masters: Mapping[str, Tensor],
        moments: Moments,
        traits: Mapping[str, Traits],
        copies: Mapping[str, Tensor],
    ) -> None:
        self.steps = 0
        self.decoupled_lr = config.decoupled_lr or config.lr
        # Separate parameters, since backward owns the .grad of the model's parameters.
        self._masters = {name: nn.Parameter(master) for name, master in masters.items()}
        self._copied = ([copies[name] for name in copies], [masters[name] for name in copies])
        self._optimizer: torch.optim.SGD | None = None
        if not masters:
            return
        self._divisor = next(iter(masters.values())).new_ones(())
        groups = []
        for own in _kinds(masters, traits):
            parameters = [master for name, master in self._masters.items() if traits[name] == own]
            strength = config.weight_decay if own.decays else 0.0
            groups.append({"params": parameters, "weight_decay": strength, "traits": own})
        self._optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
        for kind, named in moments.items():
            for name, master in self._masters.items():
                self._optimizer.state[master][kind] = named[name]

    def set_weight_decay(self, weight_decay: float) -> None:
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["weight_decay"] = weight_decay if group["traits"].decays else 0.0

    def step(self, lr: float, divisor: float | Tensor, gradients: Mapping[str, Tensor]) -> None:
        self.steps += 1
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = group["traits"].rate(lr, self.decoupled_lr)
        for name, master in self._masters.items():
            master.grad = gradients[name]
        scale: Tensor | None = None
        skips: Tensor | None = None
        if isinstance(divisor, Tensor):
            scale, skips = divisor.float(), divisor.isfinite().logical_not().float()
        elif divisor != 1.0:
            scale = self._divisor.fill_(divisor)
        self._optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self._optimizer.found_inf = skips  # type: ignore[attr-defined]
        self._optimizer.step()
        if self._copied[0]:
            torch._foreach_copy_(*self._copied)


def _kinds(masters: Mapping[str, Tensor], traits: Mapping[str, Traits]) -> list[Traits]:
    """The kinds of treatment among the masters: with weight decay first."""
    kinds = {traits[name] for name in masters}
    return sorted(kinds, key=lambda kind: (not kind.decays, kind.is_decoupled, kind.factor))


def new_moments(config: OptimizerConfig, masters: Mapping[str, Tensor]) -> Moments:
    """Moments of all masters, filled with zeros."""
    dtypes = {kind: torch.bfloat16 if config.moment_bytes(kind) == 2 else torch.float32 for kind in config.moments}
    return {
        kind: {name: torch.zeros_like(master, dtype=dtype) for name, master in masters.items()}
        for kind, dtype in dtypes.items()
    }
