"""Parallel training against serial training of a tiny model, for any parity case.

Every rank reports the shards that it updates and the parameters that it holds. The boxes of their ParameterLayout give
the whole tensors. Copies must be bitwise equal, no element may be missing, vocabulary padding must be zero, and only
the optimizer may change weights.

A case makes a step of SGD and one of AdamW, or two of AdamW. In every iteration both sides of a comparison start from
the same numbers:

- loss, gradients and their norm are compared with those of one rank on the case's weights before the iteration;
- the update is compared with that of torch's optimizer in float64 from the case's gradients.

Whole trajectories are not compared: AdamW divides a gradient by its own size. The rounding of a tiny gradient decides
the step, so that all later numbers depend on the processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from tests.trainer.parity.deviation import (
    Deviation,
    Iteration,
    Outcome,
    Reference,
    Tensors,
    deviation,
    excesses,
    limits,
)
from tests.trainer.parity.parity_case import OPTIMIZERS, VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness, seeded_generator
from trainer.model.sharding import ParameterLayout
from trainer.optimizer.loss_scaler import LossScaler
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.optimizer.split_master import joined
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_backward

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Mutation = Callable[[], AbstractContextManager[object]]
"""Makes a context manager that breaks the trainer on purpose."""


@dataclass(frozen=True)
class Held:
    """A rank's part of one parameter.

    Attributes:
        start: begin of the rank's shard in its flattened part.
        before: masters of the shard before each iteration.
        gradient: of the shard in each iteration, before clipping.
        after: masters of the shard after each iteration.
        whole: the rank's whole flattened part after the last iteration; None if no rank keeps the whole part.
    """

    layout: ParameterLayout
    start: int
    before: list[np.ndarray]
    gradient: list[np.ndarray]
    after: list[np.ndarray]
    whole: np.ndarray | None


@dataclass(frozen=True)
class Report:
    """The results of one rank."""

    mesh: ParallelMesh
    losses: list[float]
    grad_norms: list[float | None]
    held: dict[str, Held]


def train(rank: int, world_size: int, case: Case, mutation: Mutation | None = None) -> Report:
    """Run the case on this rank."""
    with mutation() if mutation is not None else nullcontext():
        return _train(_build(rank, world_size, case), case)


def _build(rank: int, world_size: int, case: Case) -> ParallelModel:
    config = case.config(OPTIMIZERS[case.steps][0])
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device(case.device))
    disturb_vectors(model)
    return model


def _train(model: ParallelModel, case: Case) -> Report:
    losses: list[float] = []
    grad_norms: list[float | None] = []
    snapshots: dict[str, list[dict[str, np.ndarray]]] = {"before": [], "gradient": [], "after": []}
    steps = OPTIMIZERS[case.steps]
    for number, options in enumerate(steps):
        if not number or options is not steps[number - 1]:
            # On the weights after the previous optimizer.
            model.gradients.wait_for_weights()
            optimizer = MixedPrecisionOptimizer(case.config(options), model)
        scale = optimizer.loss_scaler.scale
        snapshots["before"].append(_masters(model, optimizer))
        losses.append(_loss(model, case, number, scale))
        snapshots["gradient"].append(
            {shard.name: _numbers(shard.gradient) / scale for shard in model.gradients.parameter_shards}
        )
        grad_norms.append(optimizer.step(options["lr"]).grad_norm)
        snapshots["after"].append(_masters(model, optimizer))
    model.gradients.wait_for_weights()
    held = {
        shard.name: Held(
            model.layouts[shard.name],
            shard.start,
            **{kind: [snapshot[shard.name] for snapshot in taken] for kind, taken in snapshots.items()},
            whole=_whole_part(model, shard.name),
        )
        for shard in model.gradients.parameter_shards
    }
    return Report(model.mesh, losses, grad_norms, held)


def _loss(model: ParallelModel, case: Case, number: int, scale: float) -> float:
    """Forward and backward of an iteration, of this replica's micro-batches; their share of the loss."""
    mesh, counts = model.mesh, case.loss_counts(number)
    losses = forward_backward(
        model,
        [batch.to(torch.device(case.device)) for batch in case.batch(number)[mesh.dp_rank :: mesh.dp]],
        valid_tokens=counts if len(counts) > 1 else counts[0],
        loss_scale=scale,
        randomness=StepRandomness(case.config().training.seed, number),
    )
    return float((losses.cpu() / torch.tensor(counts)).sum())


def _masters(model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> dict[str, np.ndarray]:
    """Master weights of each shard: the weights themselves, except weights of 16 bits."""
    masters, shards = optimizer.tensors().get("master", {}), model.gradients.parameter_shards
    return {shard.name: _numbers(joined(masters.get(shard.name, shard.weight))) for shard in shards}


def references(rank: int, world_size: int, case: Case, weights: Mapping[int, Tensors | None]) -> list[Reference]:
    """Loss and gradients of the serial case in some iterations, on the given weights.

    None: on the initial weights.
    """
    model = _build(rank, world_size, case)
    scale = LossScaler.build(case.config().training).scale

    def whole(numbers: np.ndarray, layout: ParameterLayout) -> np.ndarray:
        return numbers.reshape(layout.global_shape)[: layout.valid_rows]

    found = []
    for number, given in weights.items():
        if given is not None:
            _write_weights(model, given)
        parameter_shards = [(shard, model.layouts[shard.name]) for shard in model.gradients.parameter_shards]
        used = {shard.name: whole(_numbers(shard.weight), layout) for shard, layout in parameter_shards}
        loss = _loss(model, case, number, scale)
        gradient = {shard.name: whole(_numbers(shard.gradient) / scale, layout) for shard, layout in parameter_shards}
        found.append(Reference(loss, used, gradient))
    return found


@torch.no_grad()
def _write_weights(model: ParallelModel, weights: Tensors) -> None:
    for shard in model.gradients.parameter_shards:
        part = model.layouts[shard.name].shard(torch.from_numpy(weights[shard.name]), model.mesh)
        shard.weight.copy_(part.view(-1)[shard.start : shard.stop])
    model.gradients.weights_changed()
    model.gradients.wait_for_weights()


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().clone().numpy()


def _whole_part(model: ParallelModel, name: str) -> np.ndarray | None:
    parameter = model.parameters[name]
    # Sharded parameters have another class.
    return _numbers(parameter.view(-1)) if type(parameter) is torch.nn.Parameter else None


@torch.no_grad()
def disturb_vectors(model: ParallelModel) -> None:
    """Randomise biases and norms, to detect a bias added twice or a lost scale."""
    for shard in model.gradients.parameter_shards:
        layout = model.layouts[shard.name]
        if not layout.decay:
            # Without padding, whose amount depends on the layout.
            shape = (layout.valid_rows or layout.global_shape[0], *layout.global_shape[1:])
            noise = torch.randn(shape, generator=seeded_generator("cpu", "noise", layout.name)) * 0.1
            shard.weight += layout.shard(noise, model.mesh).view(-1)[shard.start : shard.stop].to(shard.weight.device)
    for name, buffer in model.buffers.items():
        noise = torch.randn(buffer.shape, generator=seeded_generator("cpu", "noise", name)) * 0.1
        buffer += noise.to(buffer.device)
    model.gradients.weights_changed()
    model.gradients.wait_for_weights()


def run_case(ranks: Ranks, case: Case, mutation: Mutation | None = None) -> Outcome:
    """Train the case and assemble the reports of all ranks."""
    return assemble(case, ranks.run(train, case, mutation, world_size=case.world_size))


def assemble(case: Case, reports: list[Report]) -> Outcome:
    """Assemble whole tensors and losses per token from the reports of all ranks.

    Raises:
        AssertionError: copies that should be the same differ, an element is missing, vocabulary padding moved, or
            weights differ from the optimizer's result.
    """
    assert len({tuple(report.grad_norms) for report in reports}) == 1, "ranks disagree about the gradient's norm"
    losses = np.zeros(len(OPTIMIZERS[case.steps]))
    for report in reports:
        if report.mesh.computes_loss and report.mesh.tp_rank == 0:
            losses += report.losses
        elif not report.mesh.computes_loss:
            assert not any(report.losses), "a loss on a stage without head"
    layouts = {name: held.layout for report in reports for name, held in report.held.items()}

    def whole(what: str, number: int) -> Tensors:
        return {name: _put_together(name, what, reports, number) for name in layouts}

    iterations = []
    for number, norm in enumerate(reports[0].grad_norms):
        assert norm is not None, "an iteration was skipped"
        iterations.append(
            Iteration(float(losses[number]), norm, *(whole(what, number) for what in ("before", "gradient", "after")))
        )
    for one, other in itertools.pairwise(iterations):
        # A new optimizer takes 16-bit weights for its masters.
        _check_weights(one.after, other.before, torch.float32, _DTYPES[case.precision])
    kept = {name: _put_together(name, "whole", reports) for name in layouts}
    _check_weights(iterations[-1].after, {name: w for name, w in kept.items() if w.size}, _DTYPES[case.precision])
    return Outcome(iterations, frozenset(name for name, layout in layouts.items() if layout.decay))


def _check_weights(left: Tensors, found: Tensors, *dtypes: torch.dtype) -> None:
    """Require weights to equal the optimizer's result in one of these dtypes."""
    for name, weights in found.items():
        rounded = [torch.from_numpy(left[name]).to(dtype).float().numpy() for dtype in dtypes]
        assert any(np.array_equal(weights, one) for one in rounded), f"{name} differs from the optimizer's result"


def _put_together(name: str, what: str, reports: list[Report], number: int | None = None) -> np.ndarray:
    """Global tensor without vocabulary padding, NaN at missing elements. ``number``: of the iteration."""
    whole: np.ndarray | None = None
    for report in reports:
        held = report.held.get(name)
        if held is None or getattr(held, what) is None:
            continue
        layout = held.layout
        if whole is None:
            whole = np.full(layout.global_shape, np.nan, np.float32)
        local = np.full(int(np.prod(layout.local_shape(report.mesh))), np.nan, np.float32)
        found = getattr(held, what) if number is None else getattr(held, what)[number]
        start = 0 if number is None else held.start
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
    assert not np.isnan(whole).any(), f"{what} of {name} is incomplete"
    return whole


def held_rows(name: str, reports: list[Report]) -> int | None:
    """Number of rows of a parameter without padding; None: all rows."""
    return next(report.held[name].layout.valid_rows for report in reports if name in report.held)


def keeps_order(case: Case) -> bool:
    """True if every sum has the serial order: the result must be bit-identical.

    This holds if only the pipeline divides the model: the micro-batches pass one after another, and each gradient is
    accumulated in their order. A word table on both ends is the exception, since the ends accumulate separately.
    """
    axes, model = case.tp * case.cp * case.dp, case.config().model
    is_at_one_end = model.untie_embeddings_and_output_weights and not model.mtp_num_layers
    # A loss in chunks sums the gradient of the table in another order.
    keeps_sums = case.precision == "fp32" and case.recompute != "loss"
    return axes == 1 and keeps_sums and (is_at_one_end or case.pp == 1)


def problems(case: Case, found: Deviation, *, same_operations: bool = True) -> list[str]:
    """Quantities outside of their limits; empty when the layout is right.

    Args:
        case: the layout.
        found: deviation of the case from its reference.
        same_operations: True if case and reference ran on the same operations, so that bits can be equal.
    """
    wrong = [
        f"{what} is off by {getattr(found, what):.2e}, allowed {limits(case)[what]:.0e}"
        for what, excess in excesses(case, found).items()
        if not excess <= 1.0
    ]
    if same_operations and keeps_order(case) and not found.is_bit_equal:
        wrong.append("the bits are not those of the serial run, although every sum is made in its order")
    return wrong


def compare(ranks: Ranks, serials: dict[Any, Reference], case: Case, mutation: Mutation | None = None) -> Deviation:
    """Run a case and compare it.

    The first iteration of all cases with the same serial case starts from the same weights: its reference is computed
    once and kept in ``serials``.
    """
    if case.serial not in serials:
        [serials[case.serial]] = ranks.run(references, case.serial, {0: None}, world_size=1)[0]
    first = serials[case.serial]
    found = run_case(ranks, case, mutation)
    _check_weights(found.iterations[0].before, first.weights, _DTYPES[case.precision])
    later = {number: iteration.before for number, iteration in enumerate(found.iterations) if number}
    return deviation(case, [first, *ranks.run(references, case.serial, later, world_size=1)[0]], found)
