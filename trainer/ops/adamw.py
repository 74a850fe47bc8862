"""AdamW over lists of float32 main parameters in one pass: unscaling, update, 16-bit weights.

Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, with the bias corrections of Kingma and Ba 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from trainer.ops.operation import Implementation, Operation

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class AdamWConstants:
    """Hyperparameters of one step. Gradients are divided by ``divisor`` first."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    step: int
    """Number of this step, counted from 1."""
    divisor: float = 1.0


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
    than the masters and may be overwritten.
    """
    c = constants
    correction1, correction2 = 1.0 - c.beta1**c.step, 1.0 - c.beta2**c.step
    for master, grad, exp_avg, exp_avg_sq in zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True):
        gradient = grad.to(master.dtype) / c.divisor
        exp_avg.mul_(c.beta1).add_(gradient, alpha=1.0 - c.beta1)
        exp_avg_sq.mul_(c.beta2).addcmul_(gradient, gradient, value=1.0 - c.beta2)
        denominator = exp_avg_sq.sqrt().div_(correction2**0.5).add_(c.epsilon)
        master.mul_(1.0 - c.learning_rate * c.weight_decay)
        master.addcdiv_(exp_avg, denominator, value=-c.learning_rate / correction1)
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
    c, device = constants, masters[0].device
    # One float32 per parameter. torch increments the step before reading it.
    steps = torch.full((len(masters),), float(c.step - 1), device=device).unbind()
    torch_adamw(
        list(masters),
        [grad.to(master.dtype) for master, grad in zip(masters, grads, strict=True)],
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=True,
        grad_scale=None if c.divisor == 1.0 else torch.full((), c.divisor, device=device),
        amsgrad=False,
        beta1=c.beta1,
        beta2=c.beta2,
        lr=c.learning_rate,
        weight_decay=c.weight_decay,
        eps=c.epsilon,
        maximize=False,
    )
    _copy_masters(masters, copies)


def _native(*lists_and_constants: Any) -> None:
    *lists, c = lists_and_constants
    masters, _, exp_avgs, exp_avg_sqs, copies = lists
    # Listed one by one: dataclasses.astuple takes a third of the time of a call with one small tensor.
    constants = (c.learning_rate, c.beta1, c.beta2, c.epsilon, c.weight_decay, c.step, c.divisor)
    torch.ops.llmctl.adamw_(*map(list, lists), *constants)
    # Custom ops do not report in-place changes to autograd.
    torch.autograd.graph.increment_version([*masters, *exp_avgs, *exp_avg_sqs, *copies])


def _copy_masters(masters: Tensors, copies: Tensors) -> None:
    if copies:
        torch._foreach_copy_(list(copies), list(masters))


def _example(
    sizes: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], Any]:
    def drawn(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator)

    masters, averages = ([drawn(size).to(device) for size in sizes] for _ in range(2))
    squares = [drawn(size).square().to(device) for size in sizes]
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
    [partial(_example, sizes) for sizes in ((37, 5), (1 << 17, (1 << 16) + 24, *([24] * 170)))],
    # torch's fused step leaves the divided gradients in place.
    consumed=(1,),
    default="torch",
)
