"""CUDA kernels of softmax through their launchers, on the emulated GPU."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import DTYPES, check_errors, check_same_bits, drawn, in_float64, sparse_tensor
from trainer.ops.operation import Operation
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX

SCALE = 0.7
OPERATIONS = (SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX)
# [batch, heads, queries, keys]: keys for less than a warp, a warp, several warps, and more than a block.
SHAPES = ((1, 1, 1, 1), (2, 2, 5, 17), (1, 2, 40, 40), (1, 1, 3, 1024), (1, 1, 2, 8191), (1, 1, 1, 20000), (2, 1, 7, 3))


def forward(
    cuda: EmulatedCuda, operation: Operation, scores: torch.Tensor, mask: torch.Tensor, shares: torch.Tensor
) -> None:
    """Forward with ``mask`` [batch, 1, queries, keys], or causal with None."""
    *_, heads, queries, width = scores.shape
    rows = scores.numel() // width
    if operation is SCALED_CAUSAL_SOFTMAX:
        cuda.call("llmctl_cuda_scaled_causal_softmax", *(scores.dtype, scores, shares, queries, rows, width, SCALE))
        return
    cuda.call(
        "llmctl_cuda_scaled_masked_softmax",
        *(scores.dtype, scores, mask, shares, heads, queries, rows, width, queries * width, 0, width, SCALE),
    )


def backward(
    cuda: EmulatedCuda, operation: Operation, grads: torch.Tensor, shares: torch.Tensor, grad_scores: torch.Tensor
) -> None:
    *_, queries, width = shares.shape
    cuda.call(
        "llmctl_cuda_scaled_softmax_backward",
        *(shares.dtype, grads, shares, grad_scores, queries, shares.numel() // width, width, SCALE),
        int(operation is SCALED_CAUSAL_SOFTMAX),
    )


def mask_for(scores: torch.Tensor) -> torch.Tensor:
    batch, _, queries, width = scores.shape
    mask = drawn((batch, 1, queries, width), torch.float64, seed=1) > 0.5
    mask[0, 0, 0] = True
    return mask


def reference(
    operation: Operation, scores: torch.Tensor, mask: torch.Tensor, grads: torch.Tensor
) -> list[torch.Tensor]:
    leaf = scores.clone().requires_grad_()
    rest = (mask,) if operation is SCALED_MASKED_SOFTMAX else ()
    shares = operation.implementations["reference"].function(leaf, *rest, SCALE)
    return [shares.detach(), *torch.autograd.grad(shares, leaf, grads)]


@pytest.mark.parametrize(("shape", "dtype", "offset"), placed(SHAPES, DTYPES))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_errors_are_those_of_rounding(
    emulated_cuda: EmulatedCuda, operation: Operation, shape: tuple[int, ...], dtype: torch.dtype, offset: int | None
) -> None:
    scores, grads = (guarded(drawn(shape, dtype, seed=seed), offset=offset) for seed in (0, 2))
    mask = guarded(mask_for(scores), offset=offset)
    shares, grad_scores = (guarded(torch.full_like(scores, torch.nan), offset=offset) for _ in range(2))
    forward(emulated_cuda, operation, scores, mask, shares)
    backward(emulated_cuda, operation, grads, shares, grad_scores)
    usual = reference(operation, scores, mask, grads)
    exact = reference(operation, *in_float64((scores, mask, grads)))
    check_errors([shares, grad_scores], usual, exact, slack=8.0)


@pytest.mark.parametrize("shape", [(2, 2, 5, 40), (1, 1, 3, 4096)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_result_may_take_the_place_of_an_argument(
    emulated_cuda: EmulatedCuda, operation: Operation, shape: tuple[int, ...]
) -> None:
    scores, grads = (drawn(shape, torch.bfloat16, seed=seed) for seed in (0, 2))
    shares, grad_scores, mask = torch.empty_like(scores), torch.empty_like(scores), mask_for(scores)
    forward(emulated_cuda, operation, scores, mask, shares)
    backward(emulated_cuda, operation, grads, shares, grad_scores)
    forward(emulated_cuda, operation, scores, mask, scores)
    backward(emulated_cuda, operation, grads, scores, grads)
    check_same_bits([scores, grads], [shares, grad_scores])


def test_elements_beyond_2_to_the_31(emulated_cuda: EmulatedCuda) -> None:
    queries, width = 2**19 + 1, 8 * 1031
    scores, shares, grads = (sparse_tensor((1, 1, queries, width), torch.bfloat16) for _ in range(3))
    mask = sparse_tensor((1, 1, queries, width), torch.bool)
    last = drawn((1, 1, 1, width), torch.bfloat16)
    scores[:, :, -1:], mask[:, :, -1, ::3] = last, True
    alone, gradient = torch.empty_like(last), torch.empty_like(last)
    forward(emulated_cuda, SCALED_MASKED_SOFTMAX, last, mask[:, :, -1:].contiguous(), alone)
    backward(emulated_cuda, SCALED_MASKED_SOFTMAX, last, alone, gradient)
    with emulated_cuda.last_blocks(1):
        forward(emulated_cuda, SCALED_MASKED_SOFTMAX, scores, mask, shares)
        backward(emulated_cuda, SCALED_MASKED_SOFTMAX, scores, shares, grads)
    check_same_bits([shares[:, :, -1:], grads[:, :, -1:]], [alone, gradient])
    assert not shares[0, 0, 0].any()
