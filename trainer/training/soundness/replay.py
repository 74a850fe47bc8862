"""The origin of a step that was not finite: it is computed again, and every module looked at.

A skipped step leaves the weights as they were, and a step draws the same random numbers again. So the second
computation has the bits of the first, unless a machine has computed wrongly; it costs the time of one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.distributed.collectives import first_text, sum_over_ranks

if TYPE_CHECKING:
    from trainer.parallel_model import ParallelModel

_WEIGHTS, _FORWARD, _BACKWARD, _NOTHING = range(4)
_MOST_NAMED = 4


@dataclass
class _First:
    """The first tensor of this rank that is not finite: what it is, and its place in the order of the whole model.

    ``order``: weights before forward before backward; then the virtual stage and the call of a module in it, in the
    order of the computation.
    """

    order: tuple[int, int, int] = (_NOTHING, 0, 0)
    what: str = ""

    def note(self, order: tuple[int, int, int], what: str) -> None:
        """Keep the earliest."""
        if order < self.order or not self.what:
            self.order, self.what = order, what


def find_origin(
    model: ParallelModel,
    iteration: int,
    compute: Callable[[], Sequence[float]],
    own_losses: Sequence[float],
    device: torch.device,
) -> str:
    """Compute a skipped step again; one sentence on the first rank, module and direction that is not finite.

    Collective: all ranks. Counters of the layers are afterwards as before.

    Args:
        model: with the weights of the step.
        iteration: of the step, for the sentence.
        compute: forward and backward of the step, which returns this rank's sums of losses.
        own_losses: those sums at the first time.
        device: of small tensors of collectives.
    """
    first = _First()
    for number, (name, parameter) in enumerate(model.parameters.items()):
        if not _is_finite(parameter.detach()):
            first.note((_WEIGHTS, model.mesh.pp_rank, number), f"{name}, a weight,")
    counters = [buffer for chunk in model.chunks for buffer in chunk.buffers()]
    before = [buffer.clone() for buffer in counters]
    with _watched(model, first):
        losses = compute()
    for buffer, value in zip(counters, before, strict=True):
        buffer.copy_(value)
    differs = not _equal(losses, own_losses)
    return _agree(model, iteration, first, device, differs=differs)


def _agree(model: ParallelModel, iteration: int, first: _First, device: torch.device, *, differs: bool) -> str:
    """The sentence on all ranks, by the earliest place of any."""
    mesh = model.mesh
    width = len(first.order) + 1
    table = [0.0] * (width * mesh.world_size)
    table[width * mesh.rank : width * (mesh.rank + 1)] = [*map(float, first.order), float(differs)]
    sums = sum_over_ranks(table, device)
    rows = [tuple(sums[width * rank : width * (rank + 1)]) for rank in range(mesh.world_size)]
    changed = [rank for rank, row in enumerate(rows) if row[-1]]
    earliest = min(row[:-1] for row in rows)
    if earliest[0] == _NOTHING:
        where = f": {_ranks(mesh, changed)} computed another loss" if changed else ""
        return (
            f"iteration {iteration}: the same step, computed again, is finite{where}: a machine has computed wrongly, "
            "or a kernel is not deterministic"
        )
    guilty = [rank for rank, row in enumerate(rows) if row[:-1] == earliest]
    what = first_text(first.what if mesh.rank == guilty[0] else "", device)
    again = f" ({_ranks(mesh, changed)} computed another loss the second time)" if changed else ""
    on = _ranks(mesh, guilty)
    return f"iteration {iteration}: computed again, the first that is not finite is {what} on {on}{again}"


def _ranks(mesh: Any, ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(mesh.describe(rank) for rank in ranks[:_MOST_NAMED]) + more


@contextmanager
def _watched(model: ParallelModel, first: _First) -> Iterator[None]:
    """Look at the output of every module, and at the gradient of that output."""
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    handles = []
    for number, chunk in enumerate(model.chunks):
        stage, calls = model.placement.virtual_stage(model.mesh.pp_rank, number), count()
        for path, module in chunk.named_modules():
            if path:
                name = _global_name(path, module, names)
                handles.append(module.register_forward_hook(_look(first, stage, calls, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look(first: _First, stage: int, calls: Iterator[int], name: str) -> Callable[..., None]:
    """A hook for a module: ranks of one stage call the same modules in the same order, inner ones first."""

    def look(_module: nn.Module, _arguments: Any, output: Any) -> None:
        call = next(calls)
        for tensor in _tensors(output):
            if not _is_finite(tensor.detach()):
                first.note((_FORWARD, stage, call), f"the output of {name}")
            if tensor.requires_grad:
                tensor.register_hook(partial(look_back, call))  # type: ignore[no-untyped-call]

    def look_back(call: int, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            # The computation runs back from the last stage and module.
            first.note((_BACKWARD, -stage, -call), f"the gradient of the output of {name}")

    return look


def _global_name(path: str, module: nn.Module, names: dict[int, str]) -> str:
    """The module's path, with the number of its layer in the whole model."""
    own = next((names[id(parameter)] for parameter in module.parameters() if id(parameter) in names), None)
    if own is None:
        return path
    parts, known = path.split("."), own.split(".")
    return ".".join(known[index] if part.isdigit() and index < len(known) else part for index, part in enumerate(parts))


def _tensors(output: Any) -> Iterator[Tensor]:
    for value in output if isinstance(output, (tuple, list)) else [output]:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        left == right or (math.isnan(left) and math.isnan(right)) for left, right in zip(one, other, strict=True)
    )
