"""CUDA kernels of RMSNorm through their launchers, on the emulated GPU."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import DTYPES, check_errors, check_same_bits, drawn, in_float64, sparse_tensor
from trainer.ops.rms_norm import RMS_NORM

EPSILON = 1e-5
# Less than a warp, a warp, several warps; rows that fit in registers, and longer rows; odd widths; several blocks.
SHAPES = ((1, 2), (3, 17), (9, 64), (5, 123), (2, 1024), (1, 8192), (2, 8191), (1, 40000), (70, 8), (0, 64))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def forward(
    cuda: EmulatedCuda,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    offset: int | None,
    adds_one: int = 0,
) -> list[torch.Tensor]:
    """Normed rows, sum and scale."""
    rows, width = hidden.shape
    normed, total = (guarded(torch.full_like(hidden, torch.nan), offset=offset) for _ in range(2))
    scale = guarded(torch.full((rows,), torch.nan, dtype=wide(hidden.dtype)))
    total_or_none = None if residual is None else total
    cuda.call(
        "llmctl_cuda_rms_norm",
        *(hidden.dtype, hidden, residual, weight, total_or_none, normed, scale, rows, width, EPSILON, adds_one),
    )
    return [normed, total if residual is not None else hidden, scale]


def backward(
    cuda: EmulatedCuda,
    grad_normed: torch.Tensor,
    grad_sum: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: int | None,
    adds_one: int = 0,
) -> list[torch.Tensor]:
    """The gradients of hidden and weight."""
    rows, width = hidden.shape
    segments = cuda.size("llmctl_cuda_rms_norm_segments", rows, width)
    partial = guarded(torch.full((segments, width), torch.nan, dtype=wide(hidden.dtype)))
    grad_hidden = guarded(torch.full_like(hidden, torch.nan), offset=offset)
    grad_weight = guarded(torch.full_like(weight, torch.nan), offset=offset)
    cuda.call(
        "llmctl_cuda_rms_norm_backward",
        *(
            hidden.dtype,
            grad_normed,
            grad_sum,
            hidden,
            weight,
            scale,
            grad_hidden,
            grad_weight,
            partial,
            rows,
            width,
            adds_one,
        ),
    )
    return [grad_hidden, grad_weight]


def reference(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    grad_normed: torch.Tensor,
    grad_sum: torch.Tensor | None,
    adds_one: int = 0,
) -> list[torch.Tensor]:
    """Normed rows and gradients of hidden and weight, by the reference."""
    leaf, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = leaf if residual is None else leaf + residual
    normed = RMS_NORM.implementations["reference"].function(total, weight, EPSILON, adds_one != 0)
    outputs, gradients = [normed], [grad_normed]
    if grad_sum is not None:
        outputs, gradients = [*outputs, total], [*gradients, grad_sum]
    return [normed.detach(), *torch.autograd.grad(outputs, [leaf, weight], gradients)]


@pytest.mark.parametrize(("adds", "adds_one"), [(False, 0), (True, 0), (True, 1)])
@pytest.mark.parametrize(("shape", "dtype", "offset"), placed(SHAPES, DTYPES))
def test_errors_are_those_of_rounding(
    emulated_cuda: EmulatedCuda,
    shape: tuple[int, int],
    dtype: torch.dtype,
    adds: bool,
    adds_one: int,
    offset: int | None,
) -> None:
    tensors = [drawn(shape, dtype, seed=seed) for seed in range(4)]
    hidden, grad_normed, residual, grad_sum = (guarded(tensor, offset=offset) for tensor in tensors)
    weight = guarded(drawn(shape[1:], dtype, seed=4), offset=offset)
    others = (residual, grad_sum) if adds else (None, None)
    normed, total, scale = forward(emulated_cuda, hidden, others[0], weight, offset, adds_one)
    grads = backward(emulated_cuda, grad_normed, others[1], total, weight, scale, offset, adds_one)
    usual = reference(hidden, others[0], weight, grad_normed, others[1], adds_one)
    exact = reference(*in_float64((hidden, others[0], weight, grad_normed, others[1])), adds_one)
    # The float64 oracle rounds too, in another order and without fused multiply-add.
    check_errors([normed, *grads], usual, exact, slack=8.0 if dtype == torch.float64 else 4.0)


def test_results_may_take_the_place_of_arguments(emulated_cuda: EmulatedCuda) -> None:
    hidden, residual, weight = (
        drawn(shape, torch.bfloat16, seed=n) for n, shape in enumerate([(3, 9000)] * 2 + [(9000,)])
    )
    expected = forward(emulated_cuda, hidden, residual, weight, 16)
    scale = torch.empty(3)
    emulated_cuda.call(
        "llmctl_cuda_rms_norm",
        *(torch.bfloat16, hidden, residual, weight, residual, hidden, scale, 3, 9000, EPSILON, 0),
    )
    check_same_bits([hidden, residual, scale], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_beyond_2_to_the_31(emulated_cuda: EmulatedCuda, dtype: torch.dtype) -> None:
    rows, width = 2**22, 1031
    hidden, normed, grad_hidden = (sparse_tensor((rows, width), dtype) for _ in range(3))
    scale = sparse_tensor((rows,), torch.float32)
    values, weight = drawn((2, width), dtype), drawn((width,), dtype, seed=1)
    hidden[-2:] = values
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call(
            "llmctl_cuda_rms_norm", *(dtype, hidden, None, weight, None, normed, scale, rows, width, EPSILON, 0)
        )
    reference = RMS_NORM.implementations["reference"].function
    usual, exact = reference(values, weight, EPSILON), reference(values.double(), weight.double(), EPSILON)
    check_errors([normed[-1:]], [usual[-1:]], [exact[-1:]])
