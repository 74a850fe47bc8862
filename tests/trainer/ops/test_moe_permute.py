"""Permutation to experts and back: C++ loops, and CUDA kernels on the emulated GPU."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import ORDERS, EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import (
    DTYPES,
    call,
    check_against_oracle,
    check_errors,
    check_gradients,
    check_threads,
    drawn,
    here,
    run,
    sparse_tensor,
)
from trainer.ops.moe_permute import MOE_PERMUTE, MOE_UNPERMUTE, combine

pytestmark = pytest.mark.usefixtures("kernel_library")

# Tokens, experts per token, channels.
SHAPES = ((1, 1, 1), (5, 2, 17), (7, 3, 123), (2, 1, 8191), (41, 2, 8), (0, 2, 64), (4, 2, 2050))


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def routing(tokens, topk):
    """choices and places, with every fifth choice dropped."""
    order = torch.randperm(tokens * topk, generator=torch.Generator("cpu").manual_seed(tokens), device="cpu")
    choices = here(order[order % 5 != 3])
    places = torch.full((tokens * topk,), len(choices)).index_copy(0, choices, torch.arange(len(choices)))
    return choices, places.view(tokens, topk)


def there(shape, dtype):
    tokens, topk, width = shape
    return drawn((tokens, width), dtype).requires_grad_(), *routing(tokens, topk)


def back(shape, dtype, weighted=True):
    tokens, topk, width = shape
    choices, places = routing(tokens, topk)
    weights = drawn((tokens, topk), wide(dtype), seed=1).requires_grad_() if weighted else None
    return drawn((len(choices), width), dtype).requires_grad_(), weights, choices, places


def formula_there(tokens, choices, places):
    """The definition of permute in torch operations, with autograd's gradient."""
    return tokens[choices // places.shape[1]]


def formula_back(rows, weights, choices, places):
    """The definition of unpermute in torch operations; dropped choices select a row of zeros."""
    del choices
    chosen = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))[places]
    return (chosen if weights is None else chosen * weights.unsqueeze(-1)).sum(1)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_rounding(shape, dtype):
    check_against_oracle(MOE_PERMUTE, "native", there(shape, dtype), oracle=formula_there)
    # Products of rows nearly cancel: the float64 oracle is not more accurate than the tested implementation.
    check_against_oracle(MOE_UNPERMUTE, "native", back(shape, dtype), slack=32.0, oracle=formula_back)
    check_against_oracle(MOE_UNPERMUTE, "native", back(shape, dtype, weighted=False), slack=32.0, oracle=formula_back)


@pytest.mark.cpu_only
@pytest.mark.parametrize("shape", [(300, 2, 127), (64, 8, 127)])
def test_small_calls_have_the_same_bits(shape):
    """Small calls also round a sum once, and add in a fixed order."""
    arguments = there(shape, torch.bfloat16)
    results, gradients, _ = run(MOE_PERMUTE.small, arguments)
    right, *_ = run(MOE_PERMUTE.implementations["reference"].function, arguments, gradients=gradients)
    assert all(torch.equal(own, other) for own, other in zip(results, right, strict=True))


@pytest.mark.cpu_only
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_torch_is_right(shape):
    cases = ((MOE_PERMUTE, there, formula_there), (MOE_UNPERMUTE, back, formula_back))
    for operation, arguments, formula in cases:
        given = arguments(shape, torch.float64)
        found, gradients, _ = run(operation.implementations["reference"].function, given)
        right, *_ = run(formula, given, gradients=gradients)
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


def test_tokens_whose_choices_were_all_dropped_are_zero(dtype):
    choices, places = torch.zeros(0, dtype=torch.int64), torch.zeros((5, 2), dtype=torch.int64)
    rows, weights = drawn((0, 17), dtype).requires_grad_(), drawn((5, 2), wide(dtype)).requires_grad_()
    check_against_oracle(MOE_PERMUTE, "native", (drawn((5, 17), dtype).requires_grad_(), choices, places))
    check_against_oracle(MOE_UNPERMUTE, "native", (rows, weights, choices, places))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_gradients(backend):
    check_gradients(MOE_PERMUTE.implementations[backend].function, there((4, 2, 5), torch.float64))
    check_gradients(MOE_UNPERMUTE.implementations[backend].function, back((4, 2, 5), torch.float64))
    check_gradients(MOE_UNPERMUTE.implementations[backend].function, back((4, 2, 5), torch.float64, weighted=False))


@pytest.mark.cpu_only
def test_threads_do_not_matter():
    check_threads(MOE_UNPERMUTE.implementations["native"].function, back((512, 2, 512), torch.float32))


def test_there_and_back_is_the_token_where_weights_sum_to_one():
    tokens, choices, places = there((64, 3, 40), torch.float64)
    kept = places < len(choices)
    weights = kept / kept.sum(1, keepdim=True).clamp(min=1)
    rows = MOE_PERMUTE.implementations["native"].function(tokens, choices, places)
    returned = MOE_UNPERMUTE.implementations["native"].function(rows, weights.double(), choices, places)
    assert torch.allclose(returned, tokens * kept.any(1, keepdim=True))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_nothing_is_read_for_dropped_choices(backend):
    """An infinite row affects only its token; a dropped choice's weight affects nothing."""
    permute, unpermute = (operation.implementations[backend].function for operation in (MOE_PERMUTE, MOE_UNPERMUTE))
    tokens, choices, places = there((5, 2, 16), torch.float32)
    rows, weights, *_ = back((5, 2, 16), torch.float32)
    dropped, others = places == len(choices), (places != len(choices) - 1).all(1)
    assert (dropped.any(1) & others).any()
    with torch.no_grad():
        rows[-1], weights[dropped] = torch.inf, torch.nan
    assert unpermute(rows, weights, choices, places)[others].isfinite().all()
    assert unpermute(rows, None, choices, places)[others].isfinite().all()
    (grad,) = torch.autograd.grad(permute(tokens, choices, places), tokens, rows.detach())
    assert grad[others].isfinite().all() and grad[~others].isinf().all()


@pytest.mark.cpu_only
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("number", [-1, 10])
def test_invalid_indices_are_refused_on_cpus(backend, number):
    rows, weights, choices, places = back((5, 2, 16), torch.float32)
    unpermute = MOE_UNPERMUTE.implementations[backend].function
    wrong = choices.clone().index_fill_(0, torch.tensor([2]), number)
    with pytest.raises((RuntimeError, IndexError), match="out of range|not a number from 0 to 9"):
        unpermute(rows, weights, wrong, places).sum().backward()
    if backend == "native":
        with pytest.raises(RuntimeError, match="places has .*, not a number from 0 to 8"):
            unpermute(rows, weights, choices, places.clone().fill_(number))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({1: torch.zeros(5, 2, dtype=torch.int32)}, "places are not int64"),
        ({2: torch.zeros(4, 2)}, "weights are not one for each of 2 choices of 5 tokens"),
        ({2: torch.zeros(5, 2, dtype=torch.float64)}, "weights are not float32"),
        ({0: torch.zeros(3, 4, 5)}, "rows have 3 dims"),
    ],
)
def test_mismatched_arguments_are_refused(change, sentence):
    rows, weights, _, places = back((5, 2, 16), torch.float32)
    given = [rows, places, weights]
    for place, value in change.items():
        given[place] = value
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.llmctl.moe_combine(*given)


@pytest.mark.cpu_only
def test_invalid_indices_do_no_harm_on_a_gpu(emulated_cuda: EmulatedCuda):
    """Places beyond the rows count as dropped; choices beyond the tokens have no gradient."""
    rows, tokens = guarded(drawn((2, 8), torch.float32)), guarded(torch.full((3, 8), torch.nan))
    places = guarded(torch.tensor([[0, -1], [3, 1], [-(1 << 60), 1 << 60]]))
    emulated_cuda.call("llmctl_cuda_moe_combine", *(torch.float32, rows, places, None, tokens, 2, 2, 8, 3))
    assert torch.equal(tokens, torch.stack((rows[0], rows[1], torch.zeros(8))))
    choices, weights = guarded(torch.tensor([3, 6, -1, 1 << 60])), guarded(drawn((3, 2), torch.float32, seed=1))
    four, grad_rows = guarded(drawn((4, 8), torch.float32)), guarded(torch.full((4, 8), torch.nan))
    grad_weights = guarded(torch.zeros(3, 2))
    # A missing token must not be replaced by another token, whose gradient could give 0 * inf.
    grad_tokens = guarded(torch.tensor([torch.inf, 1.0, torch.nan])[:, None].repeat(1, 8))
    emulated_cuda.call(
        "llmctl_cuda_moe_combine_backward",
        *(torch.float32, grad_tokens, four, choices, weights, grad_rows, grad_weights, 2, 8, 4, 3),
    )
    assert torch.equal(grad_rows[0], weights[1, 1].expand(8))
    assert torch.equal(grad_rows[1:], torch.zeros(3, 8))
    assert grad_weights.flatten().nonzero().flatten().tolist() == [3]


CUDA_SHAPES = ((1, 1, 1), (7, 3, 123), (41, 2, 8), (3, 2, 4096))
WIDTH = 1 << 10
COUNT = (1 << 31) // WIDTH + 3


def many_rows():
    """Rows beyond 2^31 elements; the second to last row belongs to the last token."""
    rows, tokens = sparse_tensor((COUNT, WIDTH), torch.float32), sparse_tensor((COUNT, WIDTH), torch.float32)
    places = torch.full((COUNT, 1), COUNT)
    places[-1] = COUNT - 2
    rows[-2] = drawn((WIDTH,), torch.float32)
    return rows, tokens, places


@pytest.mark.cpu_only
def test_beyond_32_bit_indices():
    rows, tokens, places = many_rows()
    call(
        "llmctl_cpu_moe_combine",
        *(torch.float32, rows, places, None, tokens, COUNT, 1, WIDTH, COUNT - 1, COUNT),
    )
    assert torch.equal(tokens[-1], rows[-2])


@pytest.mark.cpu_only
def test_cuda_beyond_32_bit_indices(emulated_cuda: EmulatedCuda):
    rows, tokens, places = many_rows()
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call(
            "llmctl_cuda_moe_combine", *(torch.float32, rows, places, None, tokens, COUNT, 1, WIDTH, COUNT)
        )
    assert torch.equal(tokens[-1], rows[-2])


def many_gradients():
    """Gradients beyond 2^31 elements; the last row belongs to the second to last token."""
    tensors = [sparse_tensor((COUNT, WIDTH), torch.float32) for _ in range(3)]
    grad_tokens, rows, grad_rows = tensors
    grad_tokens[-2], rows[-1] = drawn((WIDTH,), torch.float32), drawn((WIDTH,), torch.float32, seed=1)
    choices, weights = torch.zeros(COUNT, dtype=torch.int64), torch.zeros(COUNT, 1)
    choices[-1], weights[-2] = COUNT - 2, 0.7
    grad_weights = torch.zeros(COUNT, 1)
    return grad_tokens, rows, choices, weights, grad_rows, grad_weights


def check_last_gradients(given):
    grad_tokens, rows, _, weights, grad_rows, grad_weights = given
    torch.testing.assert_close(grad_rows[-1], grad_tokens[-2] * weights[-2])
    torch.testing.assert_close(
        grad_weights[-2, 0].double(), grad_tokens[-2].double() @ rows[-1].double(), rtol=1e-5, atol=0
    )


@pytest.mark.cpu_only
def test_backward_beyond_32_bit_indices():
    given = many_gradients()
    call("llmctl_cpu_moe_combine_backward", *(torch.float32, *given, 1, WIDTH, COUNT - 1, COUNT))
    check_last_gradients(given)


@pytest.mark.cpu_only
def test_cuda_backward_beyond_32_bit_indices(emulated_cuda: EmulatedCuda):
    given = many_gradients()
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call("llmctl_cuda_moe_combine_backward", *(torch.float32, *given, 1, WIDTH, COUNT, COUNT))
    check_last_gradients(given)


@pytest.mark.cpu_only
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "offset"), placed(CUDA_SHAPES, DTYPES))
def test_cuda_touches_nothing_beside_its_tensors(emulated_cuda: EmulatedCuda, shape, dtype, weighted, offset):
    count, topk, width = shape
    rows, weights, choices, places = (value.detach() for value in back(shape, dtype))
    on_gpu = [guarded(rows, offset=offset), guarded(weights), guarded(choices), guarded(places)]
    tokens = guarded(torch.full((count, width), torch.nan, dtype=dtype), offset=offset)
    emulated_cuda.call(
        "llmctl_cuda_moe_combine",
        *(dtype, on_gpu[0], on_gpu[3], on_gpu[1] if weighted else None, tokens, len(choices), topk, width, count),
    )
    chosen = weights if weighted else None
    exact = combine(rows.double(), places, None if chosen is None else chosen.double())
    check_errors([tokens], [combine(rows, places, chosen)], [exact])


@pytest.mark.cpu_only
@pytest.mark.parametrize(("shape", "dtype", "offset"), placed(CUDA_SHAPES, DTYPES))
def test_cuda_backward_touches_nothing_beside_its_tensors(emulated_cuda: EmulatedCuda, shape, dtype, offset):
    count, topk, width = shape
    rows, weights, choices, places = back(shape, dtype)
    grad = drawn((count, width), dtype, seed=2)
    function = MOE_UNPERMUTE.implementations["reference"].function
    usual = torch.autograd.grad(function(rows, weights, choices, places), (rows, weights), grad)
    exact = [rows.detach().double().requires_grad_(), weights.detach().double().requires_grad_()]
    right = torch.autograd.grad(function(*exact, choices, places), exact, grad.double())
    for order in ORDERS:
        grad_rows = guarded(torch.full_like(rows, torch.nan, requires_grad=False), offset=offset)
        grad_weights = guarded(torch.zeros_like(weights, requires_grad=False))
        with emulated_cuda.order(order):
            emulated_cuda.call(
                "llmctl_cuda_moe_combine_backward",
                *(dtype, guarded(grad, offset=offset), guarded(rows.detach(), offset=offset), guarded(choices)),
                *(guarded(weights.detach()), grad_rows, grad_weights, topk, width, len(choices), count),
            )
        check_errors([grad_rows, grad_weights], usual, right, slack=32.0)
