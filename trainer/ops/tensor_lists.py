"""The sum of the squares of a list of tensors, for the norm that clips gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.ops.bench_case import Bench, Case, Draw, Size
from trainer.ops.operation import Implementation, Operation

Tensors = Sequence[torch.Tensor]
SumOfSquares = Callable[[Tensors], torch.Tensor]

# torch's CPU norm adds up in fp32 without blocking: over 50 million elements it is off by 4e-3, in pieces of this size
# by 2e-7, at the same speed (measured with torch 2.13, one AVX-512 core).
_CPU_PIECE = 1 << 16


def _reference_squares(tensors: Tensors) -> torch.Tensor:
    """The sum of the squares of all elements of some tensors, a float64 scalar; infinite or NaN where an element is."""
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        pieces += torch.split(flat, _CPU_PIECE) if flat.device.type == "cpu" else (flat,)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _native_squares(tensors: Tensors) -> torch.Tensor:
    total: torch.Tensor = torch.ops.llmctl.sum_of_squares(list(tensors))
    return total


def register() -> None:
    """Tell torch.compile about the op of the library, once it is loaded. It has no gradient."""
    torch.library.register_fake("llmctl::sum_of_squares", _fake_squares)


def _fake_squares(tensors: Tensors) -> torch.Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


def _example(
    sizes: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[torch.Tensor]]:
    return ([torch.randn(size, generator=generator).to(device, dtype) for size in sizes],)


def _case(size: Size, draw: Draw) -> Case:
    tensors = [draw.normal(*size)]
    return Case((tensors,), torch.nn.utils.get_total_norm, tensors[0].nbytes)


# The second: tensors of several stretches (csrc/common/torch/tensor_chunks.h), and more of them than one launch takes.
_EXAMPLES = ((37, 5), (1 << 17, (1 << 16) + 24, *([24] * 170)))
_BENCHED: tuple[Size, ...] = ((1 << 24,), (1 << 12,))

L2_NORM: Operation[SumOfSquares] = Operation(
    "l2_norm",
    {"native": Implementation(_native_squares), "reference": Implementation(_reference_squares)},
    [partial(_example, sizes) for sizes in _EXAMPLES],
    register=register,
    bench=Bench("elements", _BENCHED, _case),
)
"""The square of it: ranks add up squares, and take the root of their sum."""
