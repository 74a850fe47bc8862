"""Counter-based dropout: the C++ loops, and the CUDA kernel on the emulated GPU."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import (
    DTYPES,
    call,
    check_against_oracle,
    check_errors,
    check_gradients,
    check_threads,
    drawn,
    run,
    sparse_tensor,
)
from trainer.ops.bias_dropout_add import BIAS_DROPOUT_ADD, kept_elements, philox

pytestmark = pytest.mark.usefixtures("kernel_library")

SHAPES = ((1, 1), (1, 17), (7, 1), (5, 123), (3, 2, 40), (2, 8191), (123, 3), (0, 64))
SEED = 0x123456789ABCDEF
PROBABILITY = 0.3
# Combinations of bias and residual in layers.
FORMS = ((True, True), (False, True), (False, False))
NATIVE = BIAS_DROPOUT_ADD.implementations["native"].function
REFERENCE = BIAS_DROPOUT_ADD.implementations["reference"].function


class Dropout(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64), ("threshold", ctypes.c_uint32), ("scale", ctypes.c_double)]


DROPOUT = Dropout(SEED, round(PROBABILITY * 2**32), 1.0 / (1.0 - PROBABILITY))


def arguments(shape, dtype, with_bias=True, with_residual=True):
    hidden = drawn(shape, dtype).requires_grad_()
    bias = drawn(shape[-1:], dtype, seed=1).requires_grad_() if with_bias else None
    residual = drawn(shape, dtype, seed=2).requires_grad_() if with_residual else None
    positions = torch.arange(shape[0]) * 3 + (1 << 33)
    return hidden, bias, residual, positions, PROBABILITY, SEED


def formula(hidden, bias, residual, positions, probability, seed):
    """The definition in torch operations, with autograd's gradient."""
    kept = kept_elements(hidden.shape, positions, probability, seed)
    values = hidden if bias is None else hidden + bias
    dropped = torch.where(kept, values / (1.0 - probability), 0.0)
    return dropped if residual is None else dropped + residual


def test_philox_is_that_of_its_authors():
    """Known answers of Random123's kat_vectors for philox4x32-10 with zero upper counter words."""
    found = philox(torch.tensor([0]), 0)[0].tolist()
    assert found == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_rounding(shape, dtype):
    check_against_oracle(BIAS_DROPOUT_ADD, "native", arguments(shape, dtype), oracle=formula)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("with_bias", "with_residual"), FORMS)
def test_reference_torch_is_right(with_bias, with_residual):
    given = arguments((5, 3, 17), torch.float64, with_bias, with_residual)
    found, gradients, _ = run(REFERENCE, given)
    right, *_ = run(formula, given, gradients=gradients)
    torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_layouts(with_residual, with_bias, layout):
    check_against_oracle(
        BIAS_DROPOUT_ADD, "native", arguments((5, 3, 123), torch.bfloat16, with_bias, with_residual), layout=layout
    )


@pytest.mark.parametrize("function", [NATIVE, REFERENCE])
@pytest.mark.parametrize(("with_bias", "with_residual"), FORMS)
def test_gradients(with_bias, with_residual, function):
    check_gradients(function, arguments((3, 2, 5), torch.float64, with_bias, with_residual))


@pytest.mark.cpu_only
def test_threads_do_not_matter():
    check_threads(NATIVE, arguments((256, 1024), torch.float32))


@pytest.mark.parametrize("function", [NATIVE, REFERENCE])
def test_rows_are_dropped_alike_wherever_they_are(function):
    whole = torch.ones(64, 2, 33)
    positions = torch.arange(64)
    dropped = function(whole, None, None, positions, PROBABILITY, SEED)
    some = torch.tensor([5, 60, 7, 0])
    assert torch.equal(function(whole[some], None, None, some, PROBABILITY, SEED), dropped[some])


@pytest.mark.cpu_only
def test_share_and_independence_of_dropped_elements():
    kept = kept_elements(torch.Size((1000, 1000)), torch.arange(1000), PROBABILITY, SEED).double()
    deviation = math.sqrt(PROBABILITY * (1 - PROBABILITY) / kept.numel())
    assert abs(kept.mean().item() - (1 - PROBABILITY)) < 4 * deviation
    for shift in ((0, 1), (1, 0), (0, 4)):
        neighbours = torch.corrcoef(torch.stack((kept.flatten(), kept.roll(shift, (0, 1)).flatten())))[0, 1]
        assert abs(neighbours.item()) < 4 / math.sqrt(kept.numel())
    other = kept_elements(torch.Size((1000, 1000)), torch.arange(1000), PROBABILITY, SEED + 1).double()
    assert abs(torch.corrcoef(torch.stack((kept.flatten(), other.flatten())))[0, 1].item()) < 4e-3


def test_probability_zero_keeps_all():
    hidden = drawn((7, 9), torch.float32)
    assert torch.equal(NATIVE(hidden, None, None, torch.arange(7), 0.0, SEED), hidden)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({3: torch.arange(4)}, "positions are not one int64 for each row"),
        ({4: 1.0}, r"not in \[0, 1\)"),
        ({1: torch.zeros(4)}, "bias has 4 elements"),
        ({2: torch.zeros(5, 124)}, "residual has another shape"),
    ],
)
def test_mismatched_arguments_are_refused(change, sentence):
    given = list(arguments((5, 123), torch.float32))
    for place, value in change.items():
        given[place] = value
    with pytest.raises(RuntimeError, match=sentence):
        NATIVE(*given)


WIDTH = 1 << 10
LAST = 96


def many_rows():
    """Rows beyond 2^31 elements with nonzero last rows, memory for results, and positions."""
    rows = (1 << 31) // WIDTH + LAST
    hidden, output = sparse_tensor((rows, WIDTH), torch.bfloat16), sparse_tensor((rows, WIDTH), torch.bfloat16)
    hidden[-LAST:] = drawn((LAST, WIDTH), torch.bfloat16)
    return hidden, output, torch.arange(rows)


def last_rows(hidden, positions):
    return REFERENCE(hidden[-LAST:], None, None, positions[-LAST:], PROBABILITY, SEED)


@pytest.mark.cpu_only
def test_beyond_32_bit_indices():
    hidden, output, positions = many_rows()
    spans = (len(hidden) - LAST, len(hidden))
    call(
        "llmctl_cpu_bias_dropout_add",
        *(torch.bfloat16, hidden, None, None, output, positions, WIDTH, WIDTH, ctypes.byref(DROPOUT), *spans),
    )
    assert torch.equal(output[-LAST:], last_rows(hidden, positions))


@pytest.mark.cpu_only
def test_cuda_beyond_32_bit_indices(emulated_cuda: EmulatedCuda):
    hidden, output, positions = many_rows()
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call(
            "llmctl_cuda_bias_dropout_add",
            *(torch.bfloat16, hidden, None, None, output, positions, len(hidden), WIDTH, WIDTH, ctypes.byref(DROPOUT)),
        )
    # Blocks process rows in turn: rows of the last block are among the last rows too.
    written = output[-LAST:].any(1)
    assert 0 < written.sum() < LAST
    assert torch.equal(output[-LAST:][written], last_rows(hidden, positions)[written])


@pytest.mark.cpu_only
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "offset"), placed([(1, 1), (5, 123), (3, 2, 40), (70, 8)], DTYPES))
def test_cuda_touches_nothing_beside_its_tensors(emulated_cuda: EmulatedCuda, shape, dtype, with_bias, offset):
    given = [
        value.detach() if isinstance(value, torch.Tensor) else value for value in arguments(shape, dtype, with_bias)
    ]
    hidden, bias, residual = (None if one is None else guarded(one, offset=offset) for one in given[:3])
    output, positions = guarded(torch.full_like(given[0], torch.nan), offset=offset), guarded(given[3])
    inner = given[0][0].numel()
    emulated_cuda.call(
        "llmctl_cuda_bias_dropout_add",
        *(dtype, hidden, bias, residual, output, positions, shape[0], inner, shape[-1], ctypes.byref(DROPOUT)),
    )
    wide = [None if one is None else one.double() for one in given[:3]]
    check_errors([output], [REFERENCE(*given)], [REFERENCE(*wide, *given[3:])])
