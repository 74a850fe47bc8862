"""CUDA kernels of cross entropy through their launchers, on the emulated GPU."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import DTYPES, check_errors, check_same_bits, drawn, sparse_tensor
from trainer.ops.cross_entropy import CROSS_ENTROPY, LossTerms, VocabColumns

TERMS = LossTerms(z_loss=0.02, label_smoothing=0.1, ignore_index=-7)
# Less than a warp, a warp, several warps, more than a block; odd widths, so that row alignments differ.
SHAPES = ((1, 1), (3, 17), (9, 64), (5, 123), (2, 1024), (3, 8191), (1, 40000), (70, 8), (0, 64))


def statistics(
    cuda: EmulatedCuda, logits: torch.Tensor, labels: torch.Tensor, columns: VocabColumns
) -> list[torch.Tensor]:
    """Maximum, sum of exponentials, logit of the label, sum of logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    found = [guarded(torch.full((len(logits),), torch.nan, dtype=wide)) for _ in range(4)]
    cuda.call(
        "llmctl_cuda_cross_entropy_stats",
        *(logits.dtype, logits, labels, *found, None, *logits.shape),
        *(columns.first, columns.num_valid, columns.vocab_size, TERMS.ignore_index, 0.0, 0.0),
    )
    return found


def turn_into_gradient(
    cuda: EmulatedCuda,
    logits: torch.Tensor,
    labels: torch.Tensor,
    columns: VocabColumns,
    grads: torch.Tensor,
    found: list[torch.Tensor],
) -> None:
    cuda.call(
        "llmctl_cuda_cross_entropy_grad",
        *(logits.dtype, logits, labels, grads, found[0], found[1], *logits.shape),
        *(columns.first, columns.num_valid, columns.vocab_size, TERMS.ignore_index),
        *(TERMS.z_loss, TERMS.label_smoothing),
    )


def losses(labels: torch.Tensor, found: list[torch.Tensor], vocab_size: int) -> torch.Tensor:
    maximum, exp_sum, label_logit, logit_sum = found
    log_sum, share = exp_sum.log(), TERMS.label_smoothing
    plain = log_sum + (maximum - label_logit) * (1 - share) - logit_sum * (share / vocab_size)
    return (plain + TERMS.z_loss * (log_sum + maximum).square()).masked_fill(labels == TERMS.ignore_index, 0.0)


def arguments(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, VocabColumns]:
    num_valid = max(1, shape[1] - 3)
    logits = (drawn(shape, torch.float64) * 3.0).to(dtype)
    logits[:, num_valid:] = 1e4
    labels = torch.randint(0, num_valid, shape[:1], generator=torch.Generator().manual_seed(1))
    labels[2::3] = TERMS.ignore_index
    return logits, labels, VocabColumns(0, num_valid, num_valid)


def reference(
    logits: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, grads: torch.Tensor
) -> list[torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    found = CROSS_ENTROPY.implementations["reference"].function(leaf * 1, labels, columns, TERMS)
    return [found.detach(), *torch.autograd.grad(found, leaf, grads)]


@pytest.mark.parametrize(("shape", "dtype", "offset"), placed(SHAPES, DTYPES))
def test_errors_are_those_of_rounding(
    emulated_cuda: EmulatedCuda, shape: tuple[int, int], dtype: torch.dtype, offset: int | None
) -> None:
    logits, labels, columns = arguments(shape, dtype)
    rows, labels = guarded(logits, offset=offset), guarded(labels)
    found = statistics(emulated_cuda, rows, labels, columns)
    check_same_bits([rows], [logits])
    grads = guarded(drawn(shape[:1], found[0].dtype, seed=2))
    turn_into_gradient(emulated_cuda, rows, labels, columns, grads, found)
    usual = reference(logits, labels, columns, grads)
    exact = reference(logits.double(), labels, columns, grads.double())
    # The float64 oracle rounds too, in another order over long rows.
    check_errors([losses(labels, found, columns.vocab_size), rows], usual, exact, slack=8.0)
    assert not rows[:, columns.num_valid :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_beyond_2_to_the_31(emulated_cuda: EmulatedCuda, dtype: torch.dtype) -> None:
    rows, width = 2**19, 8 * 1031
    logits, labels = sparse_tensor((rows, width), dtype), sparse_tensor((rows,), torch.int64)
    found, grads = [sparse_tensor((rows,), torch.float32) for _ in range(4)], sparse_tensor((rows,), torch.float32)
    last = drawn((1, width), dtype)
    logits[-1:], labels[-1], grads[-1] = last, 17, 1.0
    where = (rows, width, 0, width, width, -100)
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call("llmctl_cuda_cross_entropy_stats", dtype, logits, labels, *found, None, *where, 0.0, 0.0)
        emulated_cuda.call(
            "llmctl_cuda_cross_entropy_grad", *(dtype, logits, labels, grads, *found[:2], *where, 0.02, 0.1)
        )
    columns = VocabColumns(0, width, width)
    alone = statistics(emulated_cuda, last, labels[-1:], columns)
    check_same_bits([one[-1:] for one in found], alone)
    turn_into_gradient(emulated_cuda, last, labels[-1:], columns, grads[-1:], alone)
    check_same_bits([logits[-1:]], [last])
    assert not logits[0].any()
