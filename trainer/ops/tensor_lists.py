"""Sum of squares over a list of tensors, for the gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.ops.operation import Implementation, Operation

Tensors = Sequence[torch.Tensor]
SumOfSquares = Callable[[Tensors], torch.Tensor]

# torch's CPU norm sums in fp32 without blocking: the relative error over 50 million elements is 4e-3. In chunks of this
# size the error is 2e-7, at the same speed (measured with torch 2.13, one AVX-512 core).
_CPU_CHUNK = 1 << 16


def _reference_squares(tensors: Tensors) -> torch.Tensor:
    """Sum of squares of all elements, float64; infinite or NaN if an element is."""
    chunks: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        chunks += torch.split(flat, _CPU_CHUNK) if flat.device.type == "cpu" else (flat,)
    # Of 16-bit elements torch would round each norm to their dtype.
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(chunks, dtype=dtype)).double().square().sum()


def _native_squares(tensors: Tensors) -> torch.Tensor:
    total: torch.Tensor = torch.ops.llmctl.sum_of_squares(list(tensors))
    return total


def _example(
    sizes: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[torch.Tensor]]:
    return ([torch.randn(size, generator=generator).to(device, dtype) for size in sizes],)


# The second: tensors of several chunks (csrc/common/torch/tensor_chunks.h), and more of them than one launch takes.
_EXAMPLES = ((37, 5), (1 << 17, (1 << 16) + 24, *([24] * 170)))

L2_NORM: Operation[SumOfSquares] = Operation(
    "l2_norm",
    {"native": Implementation(_native_squares), "reference": Implementation(_reference_squares)},
    [partial(_example, sizes) for sizes in _EXAMPLES],
)
"""Squared L2 norm: ranks add the squares, and take the root of the sum."""
