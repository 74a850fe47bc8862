"""Deviation of a parity case from its reference, and the limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.trainer.parity.parity_case import OPTIMIZERS, Case
from trainer.config.train_config import TrainConfig

# Loss per token: absolute. Gradients before clipping and masters after a step: the largest error, relative to the
# largest element of the tensor. Norm: relative.
LIMITS = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "update": 1e-6, "grad_norm": 1e-5},
    # A bf16 number has 8 significant bits, an fp16 number 11 (2^-8 = 4e-3 and 2^-11 = 5e-4 between neighbours). Sums
    # over tp and micro-batches round in another order, and the errors of a few layers add up. Masters are float32.
    "bf16": {"loss": 2e-2, "gradient": 1e-1, "update": 1e-6, "grad_norm": 5e-2},
    "fp16": {"loss": 3e-3, "gradient": 2e-2, "update": 1e-6, "grad_norm": 3e-2},
}
Tensors = Mapping[str, np.ndarray]
"""Global name -> whole tensor without vocabulary padding, float32."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of a case, assembled from its ranks.

    The fields are those of Held and Report.
    """

    loss: float
    grad_norm: float
    before: Tensors
    gradient: Tensors
    after: Tensors


@dataclass(frozen=True)
class Outcome:
    """All iterations of a case, and the names of the parameters that decay."""

    iterations: list[Iteration]
    decays: frozenset[str]


@dataclass(frozen=True)
class Reference:
    """Loss per token and gradients of one rank on some weights."""

    loss: float
    weights: Tensors
    gradient: Tensors


@dataclass(frozen=True)
class Deviation:
    """Deviation of a case from its reference, worst over iterations and parameters.

    Attributes:
        loss: absolute, per token.
        gradient: relative to the largest element of the parameter's gradient.
        update: of masters after a step, relative to the largest element of the parameter.
        grad_norm: relative.
        names: the parameters with the worst gradient and update.
        is_bit_equal: True if all losses and gradients are bit-identical.
    """

    loss: float
    gradient: float
    update: float
    grad_norm: float
    names: tuple[str, str]
    is_bit_equal: bool

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}  gradient {self.gradient:.1e} ({self.names[0]})  update {self.update:.1e} "
            f"({self.names[1]})  norm {self.grad_norm:.1e}{'  same bits' * self.is_bit_equal}"
        )


def deviation(case: Case, serial: Sequence[Reference], found: Outcome) -> Deviation:
    """Compare a case with serial gradients on its weights, and with plain optimizer steps.

    Raises:
        AssertionError: the two have different parameters or shapes.
    """
    pairs = list(zip(serial, found.iterations, strict=True))
    order = math.inf if case.precision == "fp32" else 2
    gradient = max(_worst(one.gradient, iteration.gradient, order) for one, iteration in pairs)
    stepped = zip(plain_steps(case, found), found.iterations, strict=True)
    update = max(_worst(after, iteration.after) for after, iteration in stepped)
    norms = [np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in one.gradient.values())) for one in serial]
    return Deviation(
        float(np.abs([one.loss - iteration.loss for one, iteration in pairs]).max()),
        gradient[0],
        update[0],
        float(np.abs([it.grad_norm / norm - 1.0 for it, norm in zip(found.iterations, norms, strict=True)]).max()),
        (gradient[1], update[1]),
        is_bit_equal=all(
            one.loss == it.loss and all(np.array_equal(g, it.gradient[name]) for name, g in one.gradient.items())
            for one, it in pairs
        ),
    )


def limits(case: Case) -> Mapping[str, float]:
    """Largest deviation of each quantity."""
    # The oracle's moments are not rounded: two by 2^-9 each, in a step of the size of the rate.
    rounded = {"update": 5e-4} if case.moments == "bf16" else {}
    return {**LIMITS[case.precision], **rounded}


def excesses(case: Case, found: Deviation) -> dict[str, float]:
    """Each quantity in units of its limit."""
    return {what: getattr(found, what) / limit for what, limit in limits(case).items()}


def plain_steps(case: Case, found: Outcome) -> Iterator[Tensors]:
    """Masters after each iteration, by torch's optimizers in float64.

    Each step starts from the case's values before it.
    """
    taken = itertools.groupby(zip(OPTIMIZERS[case.steps], found.iterations, strict=True), key=lambda pair: pair[0])
    for options, group in taken:
        config = case.config(options)
        parameters = {
            name: nn.Parameter(torch.zeros(weights.shape, dtype=torch.float64))
            for name, weights in found.iterations[0].before.items()
        }
        optimizer = _optimizer(config, parameters, found.decays)
        for _, iteration in group:
            for name, parameter in parameters.items():
                parameter.data.copy_(torch.from_numpy(iteration.before[name]))
                parameter.grad = torch.from_numpy(iteration.gradient[name]).double()
            nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.clip_grad)
            optimizer.step()
            yield {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


def _optimizer(
    config: TrainConfig, parameters: Mapping[str, nn.Parameter], decays: Collection[str]
) -> torch.optim.Optimizer:
    chosen = config.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters.items() if (name in decays) == decay], "weight_decay": strength}
        for decay, strength in ((True, chosen.weight_decay), (False, 0.0))
    ]
    if chosen.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.sgd_momentum)
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=(chosen.adam_beta1, chosen.adam_beta2), eps=chosen.adam_eps)


def _worst(right: Tensors, found: Tensors, order: float = math.inf) -> tuple[float, str]:
    assert right.keys() == found.keys(), "not the same parameters"

    def distance(name: str) -> float:
        assert right[name].shape == found[name].shape, f"{name} has another shape"
        # A gradient of zeros would hide every fault.
        assert right[name].any(), f"{name} is all zeros"
        # Not a number must not pass as small.
        worst = np.linalg.norm((right[name] - found[name]).ravel(), order) / np.linalg.norm(right[name].ravel(), order)
        return float(worst) if np.isfinite(worst) else float("inf")

    return max((distance(name), name) for name in right)
