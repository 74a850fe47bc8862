"""Parallel training against serial training: a few iterations of the same tiny model in any case of the matrix.

Every rank reports the pieces it updates and the parameters it holds; here they are put together, by the boxes of their
ParameterLayout, into whole tensors. Copies are required to be equal bit for bit, every element to be there, vocabulary
padding to be zero; and the whole is compared with the run on one rank.

One SGD step comes first, then two of AdamW: loss and norm of all three, the gradients of the first, and the parameters
after the first and the last are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from tests.trainer.parity.parity_case import ADAM, SGD, VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness, seeded_generator
from trainer.model.sharding import ParameterLayout
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_backward

# Loss per token: absolute. Gradients before clipping and parameters after a step: the worst element against the
# largest of the serial run's tensor. Norm: relative.
LIMITS = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "sgd": 1e-5, "adam": 1e-4, "grad_norm": 1e-5},
    # A bf16 number has 8 significant bits, an fp16 number 11 (2^-8 = 4e-3 and 2^-11 = 5e-4 between neighbours). Sums
    # over tp and micro-batches round in another order, and the errors of a few layers add up. Adam divides a gradient
    # by its own size, so that rounding alone gives steps in any direction: they show in the later losses and norms.
    "bf16": {"loss": 2e-2, "gradient": 1e-1, "sgd": 3e-2, "grad_norm": 5e-2},
    "fp16": {"loss": 3e-3, "gradient": 2e-2, "sgd": 5e-3, "grad_norm": 3e-2},
}
ITERATIONS = 3

Mutation = Callable[[], AbstractContextManager[object]]
"""Breaks the trainer on purpose for as long as it is entered."""


@dataclass(frozen=True)
class Held:
    """What one rank holds of one parameter.

    Attributes:
        start: where its piece begins in the rank's flattened part.
        gradient: of the piece, before clipping, in the first iteration.
        sgd: the piece's weights after the first iteration.
        adam: after the last one.
        whole: the rank's whole flattened part after the last one; None where no rank keeps it whole.
    """

    layout: ParameterLayout
    start: int
    gradient: np.ndarray
    sgd: np.ndarray
    adam: np.ndarray
    whole: np.ndarray | None


@dataclass(frozen=True)
class Report:
    """What one rank saw."""

    mesh: ParallelMesh
    loss_sums: list[float]
    grad_norms: list[float | None]
    held: dict[str, Held]


@dataclass(frozen=True)
class Outcome:
    """What a case computed, put together over its ranks."""

    losses: list[float]
    grad_norms: list[float]
    gradient: dict[str, np.ndarray]
    sgd: dict[str, np.ndarray]
    adam: dict[str, np.ndarray]


def train(rank: int, world_size: int, case: Case, mutation: Mutation | None = None) -> Report:
    """Run the case on this rank."""
    with mutation() if mutation is not None else nullcontext():
        return _train(rank, world_size, case)


def _train(rank: int, world_size: int, case: Case) -> Report:
    config = case.config()
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    device = torch.device(case.device)
    model = build_model(config, VOCAB_SIZE, mesh, groups, device)
    disturb_vectors(model)
    optimizers = [MixedPrecisionOptimizer(config, model)]
    loss_sums: list[float] = []
    grad_norms: list[float | None] = []
    snapshots: list[dict[str, np.ndarray]] = []
    for iteration in range(ITERATIONS):
        if iteration == 1:
            # From here on the other optimizer, on the weights that the first one left.
            model.gradients.wait_for_weights()
            optimizers.append(MixedPrecisionOptimizer(case.config(ADAM), model))
        optimizer = optimizers[-1]
        scale = optimizer.loss_scaler.scale
        loss = forward_backward(
            model,
            [batch.to(device) for batch in case.batch(iteration)[mesh.dp_rank :: mesh.dp]],
            valid_tokens=case.valid_tokens(iteration),
            loss_scale=scale,
            randomness=StepRandomness(config.training.seed, iteration),
        )
        loss_sums.append(float(loss))
        if not iteration:
            snapshots.append(
                {shard.name: _numbers(shard.gradient) / scale for shard in model.gradients.parameter_shards}
            )
        grad_norms.append(optimizer.step((ADAM if iteration else SGD)["lr"]).grad_norm)
        if iteration in (0, ITERATIONS - 1):
            snapshots.append({shard.name: _numbers(shard.weight) for shard in model.gradients.parameter_shards})
    model.gradients.wait_for_weights()
    held = {
        shard.name: Held(
            model.layouts[shard.name],
            shard.start,
            *(snapshot[shard.name] for snapshot in snapshots),
            _whole_part(model, shard.name),
        )
        for shard in model.gradients.parameter_shards
    }
    return Report(mesh, loss_sums, grad_norms, held)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().clone().numpy()


def _whole_part(model: ParallelModel, name: str) -> np.ndarray | None:
    parameter = model.parameters[name]
    # Sharded parameters are of a class of their own.
    return _numbers(parameter.view(-1)) if type(parameter) is torch.nn.Parameter else None


@torch.no_grad()
def disturb_vectors(model: ParallelModel) -> None:
    """Move biases from 0 and norms from 1, where a bias that is added twice or a lost scale would not show."""
    for shard in model.gradients.parameter_shards:
        layout = model.layouts[shard.name]
        if not layout.decay:
            noise = torch.randn(layout.global_shape, generator=seeded_generator("cpu", "noise", layout.name)) * 0.1
            shard.weight += layout.shard(noise, model.mesh).view(-1)[shard.start : shard.stop].to(shard.weight.device)
    model.gradients.weights_changed()
    model.gradients.wait_for_weights()


def run_case(ranks: Ranks, case: Case, mutation: Mutation | None = None) -> Outcome:
    """Train the case and put the ranks' reports together."""
    return assemble(case, ranks.run(train, case, mutation, world_size=case.world_size))


def assemble(case: Case, reports: list[Report]) -> Outcome:
    """Whole tensors and losses per token out of the reports of all ranks.

    Raises:
        AssertionError: copies that should be the same differ, an element is missing, or vocabulary padding moved.
    """
    assert len({tuple(report.grad_norms) for report in reports}) == 1, "ranks disagree about the gradient's norm"
    sums = np.zeros(ITERATIONS)
    for report in reports:
        if report.mesh.computes_loss and report.mesh.tp_rank == 0:
            sums += report.loss_sums
        elif not report.mesh.computes_loss:
            assert not any(report.loss_sums), "a loss on a stage without head"
    norms = [norm for norm in reports[0].grad_norms if norm is not None]
    assert len(norms) == ITERATIONS, "an iteration was skipped"
    names = list(dict.fromkeys(name for report in reports for name in report.held))
    for name in names:
        _put_together(name, "whole", reports)
    return Outcome(
        losses=list(sums / [case.valid_tokens(iteration) for iteration in range(ITERATIONS)]),
        grad_norms=norms,
        gradient={name: _put_together(name, "gradient", reports) for name in names},
        sgd={name: _put_together(name, "sgd", reports) for name in names},
        adam={name: _put_together(name, "adam", reports) for name in names},
    )


def _put_together(name: str, what: str, reports: list[Report]) -> np.ndarray:
    """The global tensor, NaN where nobody has anything; without vocabulary padding."""
    whole: np.ndarray | None = None
    for report in reports:
        held = report.held.get(name)
        if held is None or getattr(held, what) is None:
            continue
        layout = held.layout
        if whole is None:
            whole = np.full(layout.global_shape, np.nan, np.float32)
        local = np.full(int(np.prod(layout.local_shape(report.mesh))), np.nan, np.float32)
        found = getattr(held, what)
        start = 0 if what == "whole" else held.start
        local[start : start + len(found)] = found
        for box in layout.boxes(report.mesh):
            part = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            mine = local[box.start : box.stop].reshape(box.shape)
            both = ~np.isnan(mine) & ~np.isnan(part)
            assert np.array_equal(mine[both], part[both]), f"copies of {what} of {name} differ"
            np.copyto(part, mine, where=~np.isnan(mine))
            local[box.start : box.stop] = 0.0
        assert not np.nan_to_num(local).any(), f"vocabulary padding of {name} moved"
    if whole is None:
        return np.zeros(0)
    whole = whole[: held_rows(name, reports)]
    assert what == "whole" or not np.isnan(whole).any(), f"{what} of {name} is not all there"
    return whole


def held_rows(name: str, reports: list[Report]) -> int | None:
    """Rows of a parameter that mean something; None: all."""
    return next(report.held[name].layout.valid_rows for report in reports if name in report.held)


@dataclass(frozen=True)
class Deviation:
    """How far a case is from the serial run, worst over iterations and parameters.

    Attributes:
        loss: absolute, per token.
        gradient: relative to the largest element of the parameter's serial gradient.
        sgd: of parameters after the SGD step, relative to the largest element of the serial parameter.
        adam: the same after the steps of AdamW.
        grad_norm: relative.
        names: the parameters with the worst gradient, sgd and adam.
        is_bit_equal: whether all losses and gradients are the same bits.
    """

    loss: float
    gradient: float
    sgd: float
    adam: float
    grad_norm: float
    names: tuple[str, str, str]
    is_bit_equal: bool

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}  gradient {self.gradient:.1e} ({self.names[0]})  sgd {self.sgd:.1e}  "
            f"adam {self.adam:.1e} ({self.names[2]})  norm {self.grad_norm:.1e}{'  same bits' * self.is_bit_equal}"
        )


def deviation(serial: Outcome, found: Outcome) -> Deviation:
    """Compare a case with its serial run.

    Raises:
        AssertionError: the two do not even hold the same parameters of the same shapes.
    """
    assert serial.gradient.keys() == found.gradient.keys(), "not the same parameters"
    worst = [_worst(getattr(serial, what), getattr(found, what)) for what in ("gradient", "sgd", "adam")]
    losses = np.abs(np.subtract(serial.losses, found.losses))
    norms = np.abs(np.subtract(serial.grad_norms, found.grad_norms)) / serial.grad_norms
    return Deviation(
        float(losses.max()),
        *(distance for distance, _ in worst),
        float(norms.max()),
        (worst[0][1], worst[1][1], worst[2][1]),
        is_bit_equal=bool(serial.losses[0] == found.losses[0])
        and all(np.array_equal(serial.gradient[name], found.gradient[name]) for name in serial.gradient),
    )


def _worst(serial: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[float, str]:
    def distance(name: str) -> float:
        assert serial[name].shape == found[name].shape, f"{name} has another shape"
        # A gradient that is nothing but zeros would hide everything.
        assert serial[name].any(), f"{name} is all zeros"
        # Not a number must not pass as small.
        worst = np.abs(serial[name] - found[name]).max() / np.abs(serial[name]).max()
        return float(worst) if np.isfinite(worst) else float("inf")

    return max((distance(name), name) for name in serial)


def keeps_order(case: Case) -> bool:
    """Whether every sum of the case is made in the serial order, so that it must give the same bits.

    That is so where only the pipeline divides the model: the micro-batches pass one after another, and each gradient is
    accumulated in their order. A tied table is the exception, since head and embedding accumulate apart.
    """
    axes = case.tp * case.cp * case.dp
    untied = case.config().model.untie_embeddings_and_output_weights
    return axes == 1 and case.precision == "fp32" and (untied or case.pp == 1)


def problems(case: Case, found: Deviation) -> list[str]:
    """What lies outside of the limits; empty when the layout is right."""
    wrong = [
        f"{what} is off by {getattr(found, what):.2e}, allowed {limit:.0e}"
        for what, limit in LIMITS[case.precision].items()
        if not getattr(found, what) <= limit
    ]
    if keeps_order(case) and not found.is_bit_equal:
        wrong.append("the bits are not those of the serial run, although every sum is made in its order")
    return wrong


def compare(ranks: Ranks, serials: dict[Any, Outcome], case: Case, mutation: Mutation | None = None) -> Deviation:
    """Run a case against its serial run, which is run once and kept in ``serials``."""
    if case.serial not in serials:
        serials[case.serial] = run_case(ranks, case.serial)
    return deviation(serials[case.serial], run_case(ranks, case, mutation))
