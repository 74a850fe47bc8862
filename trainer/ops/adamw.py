"""AdamW over lists of float32 main parameters in one pass: unscaling, update, 16-bit weights.

Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, with the bias corrections of Kingma and Ba 2015. Moments in
bfloat16 are widened, updated in float32 and rounded to nearest when they are stored; the masters are updated from the
moments before that rounding. Masters may be kept as bfloat16 weights and remainders: see master_halves.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from trainer.ops.master_halves import join_master, split_master
from trainer.ops.operation import Implementation, Operation

Tensors = Sequence[torch.Tensor]

# Elements of a tensor that are widened together, multiples of every kernel's vector: on a CPU what stays in its caches
# (2^24 elements on one core of an EPYC: 46 ms, 218 ms in one piece), on a GPU 64 MB of each moment.
_WIDENED_IN_CACHE, _WIDENED = 1 << 16, 1 << 24


@dataclass(frozen=True)
class AdamWConstants:
    """Hyperparameters of one step.

    Gradients are divided by ``divisor`` first. It may be a float64 number [] on the device of the masters, so that the
    host need not wait for it; then NaN or infinity changes nothing.
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    step: int
    """Number of this step, counted from 1."""
    divisor: float | torch.Tensor = 1.0


AdamW = Callable[[Tensors, Tensors, Tensors, Tensors, Tensors, AdamWConstants], None]


def _reference(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    copies: Tensors,
    constants: AdamWConstants,
) -> None:
    """Update masters and moments in place, and cast the masters into ``copies``.

    All lists have the same length, at least 1; only ``copies`` may be empty instead. ``grads`` may have another dtype
    than the masters and may be overwritten. Moments may be bfloat16, each kind for itself. Masters of int16 are the
    remainders of ``copies``, which are then bfloat16, and read too.
    """
    if masters[0].dtype == torch.int16:
        _step_in_parts(_reference, (masters, grads, exp_avgs, exp_avg_sqs, copies), constants)
        return
    c = constants
    if isinstance(c.divisor, torch.Tensor) and not c.divisor.isfinite():
        return
    correction1, correction2 = 1.0 - c.beta1**c.step, 1.0 - c.beta2**c.step
    for master, grad, exp_avg, exp_avg_sq in zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True):
        gradient = grad.to(master.dtype) / c.divisor
        # The moments themselves if they have the dtype of the masters.
        average, square = exp_avg.to(master.dtype), exp_avg_sq.to(master.dtype)
        average.mul_(c.beta1).add_(gradient, alpha=1.0 - c.beta1)
        square.mul_(c.beta2).addcmul_(gradient, gradient, value=1.0 - c.beta2)
        denominator = square.sqrt().div_(correction2**0.5).add_(c.epsilon)
        master.mul_(1.0 - c.learning_rate * c.weight_decay)
        master.addcdiv_(average, denominator, value=-c.learning_rate / correction1)
        exp_avg.copy_(average)
        exp_avg_sq.copy_(square)
    _copy_masters(masters, copies)


def _torch(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    copies: Tensors,
    constants: AdamWConstants,
) -> None:
    """See ``_reference``."""
    if masters[0].dtype == torch.int16:
        _step_in_parts(_torch, (masters, grads, exp_avgs, exp_avg_sqs, copies), constants)
        return
    if all(moments[0].dtype == torch.float32 for moments in (exp_avgs, exp_avg_sqs)):
        _torch_step(masters, grads, exp_avgs, exp_avg_sqs, constants)
    else:
        # torch's step takes moments of the masters' dtype: a part of a tensor at a time is widened.
        for master, grad, exp_avg, exp_avg_sq in _parts(masters, grads, exp_avgs, exp_avg_sqs):
            average, square = exp_avg.to(master.dtype), exp_avg_sq.to(master.dtype)
            _torch_step([master], [grad], [average], [square], constants)
            exp_avg.copy_(average)
            exp_avg_sq.copy_(square)
    _copy_masters(masters, copies)


def _parts(*lists: Tensors) -> Iterator[tuple[torch.Tensor, ...]]:
    size = _WIDENED_IN_CACHE if lists[0][0].device.type == "cpu" else _WIDENED
    for whole in zip(*lists, strict=True):
        yield from zip(*(torch.split(one, size) for one in whole), strict=True)


def _step_in_parts(step: AdamW, lists: Sequence[Tensors], constants: AdamWConstants) -> None:
    """Join masters from remainders and weights, the last of the lists, a part at a time, and split them again."""
    for remainder, grad, exp_avg, exp_avg_sq, weight in _parts(*lists):
        master = join_master(weight, remainder)
        step([master], [grad], [exp_avg], [exp_avg_sq], [], constants)
        split_master(master, weight, remainder)


def _torch_step(
    masters: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, constants: AdamWConstants
) -> None:
    c, device = constants, masters[0].device
    # One float32 per parameter. torch increments the step before reading it.
    steps = torch.full((len(masters),), float(c.step - 1), device=device).unbind()
    scale: torch.Tensor | None = None
    skips: torch.Tensor | None = None
    if isinstance(c.divisor, torch.Tensor):
        scale, skips = c.divisor.float(), c.divisor.isfinite().logical_not().float()
    elif c.divisor != 1.0:
        scale = torch.full((), c.divisor, device=device)
    torch_adamw(
        list(masters),
        [grad.to(master.dtype) for master, grad in zip(masters, grads, strict=True)],
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=True,
        grad_scale=scale,
        found_inf=skips,
        amsgrad=False,
        beta1=c.beta1,
        beta2=c.beta2,
        lr=c.learning_rate,
        weight_decay=c.weight_decay,
        eps=c.epsilon,
        maximize=False,
    )


def _native(*lists_and_constants: Any) -> None:
    *lists, c = lists_and_constants
    masters, _, exp_avgs, exp_avg_sqs, copies = lists
    # Listed one by one: dataclasses.astuple takes a third of the time of a call with one small tensor.
    divisors = (1.0, c.divisor) if isinstance(c.divisor, torch.Tensor) else (c.divisor, None)
    constants = (c.learning_rate, c.beta1, c.beta2, c.epsilon, c.weight_decay, c.step, *divisors)
    torch.ops.llmctl.adamw_(*map(list, lists), *constants)
    # Custom ops do not report in-place changes to autograd.
    torch.autograd.graph.increment_version([*masters, *exp_avgs, *exp_avg_sqs, *copies])


def _copy_masters(masters: Tensors, copies: Tensors) -> None:
    if copies:
        torch._foreach_copy_(list(copies), list(masters))


def _example(
    sizes: Sequence[int],
    of_moments: torch.dtype,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], Any]:
    def drawn(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator)

    masters, averages = ([drawn(size).to(device) for size in sizes] for _ in range(2))
    averages = [average.to(of_moments) for average in averages]
    squares = [drawn(size).square().to(device, of_moments) for size in sizes]
    # As in training, which accumulates gradients in float32 for any dtype of the weights.
    grads = [drawn(size).to(device) for size in sizes]
    copies = [] if dtype == torch.float32 else [drawn(size).to(device, dtype) for size in sizes]
    return masters, grads, averages, squares, copies, AdamWConstants(0.01, 0.9, 0.95, 1e-8, 0.1, step=3, divisor=7.0)


_LOW = (torch.float32, torch.bfloat16, torch.float16)

ADAMW: Operation[AdamW] = Operation(
    "adamw",
    {
        "native": Implementation(_native, dtypes=_LOW),
        "torch": Implementation(_torch),
        "reference": Implementation(_reference),
    },
    # The second example has tensors of several chunks, and more tensors than one launch takes.
    [
        partial(_example, (37, 5), torch.float32),
        partial(_example, (1 << 17, (1 << 16) + 24, *([24] * 170)), torch.float32),
        partial(_example, (37, 5, (1 << 13) + 24), torch.bfloat16),
    ],
    # torch's fused step leaves the divided gradients in place.
    consumed=(1,),
    default="torch",
)
