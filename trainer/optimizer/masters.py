"""The arithmetic of a step over float32 masters and their moments on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig

Moments = dict[str, dict[str, Tensor]]
"""Kind -> name -> 1-D float32."""


class Masters:
    """Masters with their moments, and AdamW (Loshchilov and Hutter 2019, algorithm 2) or SGD with momentum over them.

    torch's fused kernels do the arithmetic; their ``grad_scale`` divides by loss scale and clipping in the same pass
    over memory. There may be no masters at all.
    """

    def __init__(
        self, config: OptimizerConfig, masters: Mapping[str, Tensor], moments: Moments, decays: Mapping[str, bool]
    ) -> None:
        """Take over tensors, which stay where they are.

        Args:
            config: which optimizer, and its constants.
            masters: float32, 1-D, on one device, by any name.
            moments: of each kind in ``moment_names``, shaped like the masters.
            decays: which of them weight decay applies to.
        """
        # Parameters of their own, since the .grad of the model's belongs to backward.
        self._masters = {name: nn.Parameter(master) for name, master in masters.items()}
        self._optimizer = _build(config, self._masters, decays) if masters else None
        self._divisor = next(iter(masters.values())).new_ones(()) if masters else None
        for name, master in self._masters.items():
            assert self._optimizer is not None
            state = self._optimizer.state[master]
            for kind, named in moments.items():
                state[kind] = named[name]
            if config.optimizer == "adam":
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)

    @torch.no_grad()
    def step(self, lr: float, divisor: float, gradients: Mapping[str, Tensor]) -> None:
        """Update the masters from ``gradients / divisor``; the gradients are no longer meaningful afterwards."""
        if self._optimizer is None or self._divisor is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for name, master in self._masters.items():
            master.grad = gradients[name]
        self._divisor.fill_(divisor)
        self._optimizer.grad_scale = None if divisor == 1.0 else self._divisor  # type: ignore[attr-defined]
        self._optimizer.step()

    def set_steps(self, steps: int) -> None:
        """Go on as after so many steps: Adam's bias correction counts them."""
        for master in self._masters.values():
            assert self._optimizer is not None
            state = self._optimizer.state[master]
            if "step" in state:
                state["step"].fill_(float(steps))


def moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """Kinds of moments that the optimizer keeps."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()


def new_moments(config: OptimizerConfig, masters: Mapping[str, Tensor]) -> Moments:
    """Zeros beside every master."""
    return {kind: {name: torch.zeros_like(master) for name, master in masters.items()} for kind in moment_names(config)}


def _build(
    config: OptimizerConfig, masters: Mapping[str, nn.Parameter], decays: Mapping[str, bool]
) -> torch.optim.Optimizer:
    decayed = [master for name, master in masters.items() if decays[name]]
    free = [master for name, master in masters.items() if not decays[name]]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (free, 0.0))
        if parameters
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
