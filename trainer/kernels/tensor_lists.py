"""The sum of the squares of a list of tensors, and a factor for all elements, for clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.kernels.bench_case import Bench, Case, Draw, Size
from trainer.kernels.operation import Implementation, Operation

Tensors = Sequence[torch.Tensor]
SumOfSquares = Callable[[Tensors], torch.Tensor]
Scale = Callable[[Tensors, float], torch.Tensor]

# torch's CPU norm adds up in fp32 without blocking: over 50 million elements it is off by 4e-3, in pieces of this size
# by 2e-7, at the same speed (measured with torch 2.13, one AVX-512 core).
_CPU_PIECE = 1 << 16


def _eager_squares(tensors: Tensors) -> torch.Tensor:
    """The sum of the squares of all elements of some tensors, a float64 scalar; infinite or NaN where an element is."""
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        pieces += torch.split(flat, _CPU_PIECE) if flat.device.type == "cpu" else (flat,)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _own_squares(tensors: Tensors) -> torch.Tensor:
    total: torch.Tensor = torch.ops.llmctl.sum_of_squares(list(tensors))
    return total


def _eager_scale(tensors: Tensors, factor: float) -> torch.Tensor:
    """Multiply all elements of some tensors, in place; a float32 scalar: 1 if a product is not finite, else 0."""
    for tensor in tensors:
        # torch._foreach_mul_ on a CPU rounds the factor to the dtype of the tensors first (torch 2.13).
        tensor.mul_(factor)
    bad = torch.stack([tensor.isfinite().all() for tensor in tensors]).all().logical_not()
    return bad.to(torch.float32)


def _own_scale(tensors: Tensors, factor: float) -> torch.Tensor:
    flag: torch.Tensor = torch.ops.llmctl.scale_(list(tensors), factor)
    # The ops of a library do not tell autograd what they change.
    torch.autograd.graph.increment_version(list(tensors))
    return flag


def register() -> None:
    """Tell torch.compile about the ops of the library, once it is loaded. They have no gradients."""
    torch.library.register_fake("llmctl::sum_of_squares", _fake_squares)
    torch.library.register_fake("llmctl::scale_", _fake_scale)


def _fake_squares(tensors: Tensors) -> torch.Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


def _fake_scale(tensors: Tensors, factor: float) -> torch.Tensor:
    del factor
    return tensors[0].new_empty((), dtype=torch.float32)


def _example(
    sizes: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[torch.Tensor]]:
    return ([torch.randn(size, generator=generator).to(device, dtype) for size in sizes],)


def _example_of_scale(
    sizes: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[torch.Tensor], float]:
    return (*_example(sizes, device, dtype, generator), 0.37)


def _plain_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(tensors)


def _plain_scale(tensors: list[torch.Tensor], factor: float) -> torch.Tensor:
    torch._foreach_mul_(tensors, factor)
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()


def _case(size: Size, draw: Draw) -> Case:
    tensors = [draw.normal(*size)]
    return Case((tensors,), _plain_norm, tensors[0].nbytes)


def _case_of_scale(size: Size, draw: Draw) -> Case:
    tensors = [draw.normal(*size)]
    # So near to 1 that values stay where they are, call after call.
    return Case((tensors, 1.0 - 2.0**-20), _plain_scale, 2 * tensors[0].nbytes)


# The second: tensors of several stretches (csrc/binding/tensor_chunks.h), and more of them than one launch takes.
_EXAMPLES = ((37, 5), (1 << 17, (1 << 16) + 24, *([24] * 170)))
_BENCHED: tuple[Size, ...] = ((1 << 24,), (1 << 12,))

L2_NORM: Operation[SumOfSquares] = Operation(
    "l2_norm",
    {"own": Implementation(_own_squares), "eager": Implementation(_eager_squares)},
    [partial(_example, sizes) for sizes in _EXAMPLES],
    register=register,
    bench=Bench("elements", _BENCHED, _case),
)
"""The square of it: ranks add up squares, and take the root of their sum."""

SCALE: Operation[Scale] = Operation(
    "scale",
    {"own": Implementation(_own_scale), "eager": Implementation(_eager_scale)},
    [partial(_example_of_scale, sizes) for sizes in _EXAMPLES],
    register=register,
    bench=Bench("elements", _BENCHED, _case_of_scale),
)
