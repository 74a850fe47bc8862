"""CUDA kernels of activations on the emulated GPU: order of threads, indices beyond int32."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import ORDERS, EmulatedCuda
from tests.trainer.ops.op_checks import check_errors, check_same_bits, drawn, sparse_tensor
from trainer.ops.activation import ACTIVATION

GATED_SILU = (0, 1)


def backward(cuda: EmulatedCuda, rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of inner, bias and row weights."""
    grad, inner = drawn((rows, width), dtype), drawn((rows, 2 * width), dtype, seed=1)
    bias, weights = drawn((2 * width,), dtype, seed=2), drawn((rows,), torch.float32, seed=3)
    results = [torch.full_like(tensor, torch.nan) for tensor in (inner, bias, weights)]
    count = cuda.size("llmctl_cuda_activation_partials", dtype, 1, grad, inner, bias, weights, results[0], rows, width)
    partial = torch.full((count,), torch.nan)
    cuda.call(
        "llmctl_cuda_activation_backward",
        *(dtype, *GATED_SILU, grad, inner, bias, weights, *results, partial, rows, width),
    )
    return results


@pytest.mark.parametrize(("rows", "width"), [(40, 24), (9, 1100)])
def test_bits_do_not_depend_on_the_order_of_threads_and_blocks(
    emulated_cuda: EmulatedCuda, rows: int, width: int
) -> None:
    outcomes = []
    for order in ORDERS:
        with emulated_cuda.order(order):
            outcomes.append(backward(emulated_cuda, rows, width, torch.bfloat16))
    assert not any(result.isnan().any() for result in outcomes[0])
    for outcome in outcomes[1:]:
        check_same_bits(outcome, outcomes[0])


def test_elements_beyond_2_to_the_31(emulated_cuda: EmulatedCuda) -> None:
    rows, width, dtype = 2**21 + 4, 1032, torch.bfloat16
    inner, activated = sparse_tensor((rows, 2 * width), dtype), sparse_tensor((rows, width), dtype)
    inner[-1] = drawn((2 * width,), dtype)
    with emulated_cuda.last_blocks(2):
        emulated_cuda.call("llmctl_cuda_activation", *(dtype, *GATED_SILU, inner, None, None, activated, rows, width))
    reference = ACTIVATION.implementations["reference"].function
    usual, exact = (reference(inner[-1:].to(kind), None, None, "silu", True) for kind in (dtype, torch.float64))
    check_errors([activated[-1:]], [usual], [exact])
