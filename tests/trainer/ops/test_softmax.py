"""Scaled softmax with causal masks and mask tensors: errors, gradients, masked rows, widths."""

import pytest
import torch

from tests.trainer.ops.op_checks import (
    DTYPES,
    call,
    check_against_oracle,
    check_gradients,
    check_same_bits,
    check_threads,
    drawn,
    poisoned,
    sparse_tensor,
)
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX

pytestmark = pytest.mark.usefixtures("kernel_library")

SCALE = 0.7
BACKENDS = ["native", "reference"]
SHAPES = [
    (1, 1, 1, 1),
    (1, 2, 17, 17),
    (2, 3, 5, 123),
    (1, 1, 3, 8191),
    (1, 1, 2, 8192),
    (2, 2, 123, 5),
    (0, 2, 8, 8),
    (2, 1, 64, 64),
]


@pytest.fixture(params=[SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX], ids=lambda operation: operation.name)
def operation(request):
    return request.param


def arguments(operation, shape, dtype, mask_shape=None):
    scores = (drawn(shape, torch.float64) * 2.0).to(dtype).requires_grad_()
    if operation is SCALED_CAUSAL_SOFTMAX:
        return scores, SCALE
    mask = drawn(mask_shape or (shape[0], 1, *shape[2:]), torch.float64, seed=1) > 0.5
    if mask.numel():
        mask.flatten(0, -2)[0] = True
    return scores, mask, SCALE


def formula(scores, *rest):
    """The definition in torch operations, with autograd's gradient."""
    queries, keys = scores.shape[-2:]
    seen = ~rest[0] if len(rest) == 2 else torch.arange(keys) <= torch.arange(queries).unsqueeze(1) + keys - queries
    powers = (scores * rest[-1]).exp() * seen
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_those_of_rounding(operation, shape, dtype):
    check_against_oracle(operation, "native", arguments(operation, shape, dtype), oracle=formula)


@pytest.mark.usefixtures("level")
def test_sums_of_long_rows_keep_their_digits():
    scores = drawn((36, 1, 1, 1025), torch.float64).float()
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    shares = SCALED_MASKED_SOFTMAX.implementations["native"].function(scores, seen, 1.0)
    expected = scores.double().softmax(-1)
    assert ((shares - expected).norm() / expected.norm()).item() < 2e-7


@pytest.mark.cpu_only
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_torch_is_right(operation, shape, dtype):
    scores, *rest = arguments(operation, shape, dtype)
    shares = operation.implementations["reference"].function(scores, *rest)
    assert shares.dtype == dtype
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(shares.double(), formula(scores.double(), *rest), **tolerance)


@pytest.mark.parametrize(
    "mask_shape", [(2, 3, 7, 33), (2, 1, 7, 33), (1, 1, 7, 33), (2, 1, 1, 33), (1, 3, 1, 33)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_mask_may_be_shared(mask_shape, dtype):
    given = arguments(SCALED_MASKED_SOFTMAX, (2, 3, 7, 33), dtype, mask_shape)
    check_against_oracle(SCALED_MASKED_SOFTMAX, "native", given, oracle=formula)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_mask_that_was_expanded_or_cut_out_is_read_as_it_is(dtype):
    scores, mask, scale = arguments(SCALED_MASKED_SOFTMAX, (2, 3, 7, 32), dtype)
    own, shape = SCALED_MASKED_SOFTMAX.implementations["native"].function, scores.shape
    cut_out = torch.cat((mask, mask), -1)[..., 16:48]
    for seen in (mask.expand(shape), mask[:, :, 1:2].expand(shape), mask[:1, :, 1:2].expand(shape), cut_out):
        assert not seen.is_contiguous()
        check_same_bits([own(scores, seen, scale)], [own(scores, seen.contiguous(), scale)])


def test_a_gradient_may_be_an_expanded_number(operation):
    """The gradient of a sum is an expanded 1; its result rounds to 0."""
    scores, *rest = arguments(operation, (2, 3, 9, 37), torch.float32)
    shares = operation.implementations["native"].function(scores, *rest)
    number = torch.tensor(2.5).expand(shares.shape)
    grads = [torch.autograd.grad(shares, scores, one, retain_graph=True) for one in (number, number.contiguous())]
    check_same_bits(*grads)
    assert grads[0][0].abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 2, 4, 4), (1, 1, 2, 5), (1, 1, 4, 2)], ids=str)
def test_gradients_are_those_of_finite_differences(operation, shape, backend):
    check_gradients(operation.implementations[backend].function, arguments(operation, shape, torch.float64))


@pytest.mark.cpu_only
def test_bits_do_not_depend_on_threads(operation, dtype):
    check_threads(operation.implementations["native"].function, arguments(operation, (2, 3, 217, 217), dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_see_nothing_have_no_shares(dtype, backend):
    scores = drawn((1, 2, 6, 4), dtype).requires_grad_()
    for operation, rest in ((SCALED_CAUSAL_SOFTMAX, ()), (SCALED_MASKED_SOFTMAX, (torch.ones(1, 1, 6, 4) > 0,))):
        with poisoned():
            shares = operation.implementations[backend].function(scores, *rest, SCALE)
            (grad,) = torch.autograd.grad(shares, scores, torch.ones_like(shares))
        nothing = 2 if operation is SCALED_CAUSAL_SOFTMAX else 6
        assert not shares[:, :, :nothing].any()
        assert not grad[:, :, :nothing].any()
        assert (shares[:, :, nothing:].sum(-1) > 0.9).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_elements_may_be_anything(dtype, backend):
    """Masked scores and masked gradients may be anything, including NaN."""
    scores, grads = drawn((1, 1, 40, 40), dtype), drawn((1, 1, 40, 40), dtype, seed=1)
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    spoiled = scores.masked_fill(future, torch.nan).requires_grad_()
    clean = scores.clone().requires_grad_()
    for operation, rest in ((SCALED_CAUSAL_SOFTMAX, ()), (SCALED_MASKED_SOFTMAX, (future[None, None],))):
        function = operation.implementations[backend].function
        shares, expected = function(spoiled, *rest, SCALE), function(clean, *rest, SCALE)
        found = torch.autograd.grad(shares, spoiled, grads)
        check_same_bits([shares, *found], [expected, *torch.autograd.grad(expected, clean, grads)])
        assert not shares[0, 0][future].any()
        assert not found[0][0, 0][future].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_nan(operation, backend):
    scores = torch.zeros(1, 1, 4, 4)
    scores[0, 0, 1, 0], scores[0, 0, 2, 0], scores[0, 0, 3] = torch.nan, torch.inf, -torch.inf
    rest = () if operation is SCALED_CAUSAL_SOFTMAX else (torch.zeros(1, 1, 4, 4) > 0,)
    shares = operation.implementations[backend].function(scores, *rest, SCALE)
    assert shares[0, 0, :, 0].isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores(dtype, backend):
    scores = torch.tensor([[6e4, -6e4, 5.9e4], [-6e4, -6e4, -torch.inf]]).to(dtype)
    shares = SCALED_MASKED_SOFTMAX.implementations[backend].function(
        scores[None, None], torch.zeros(1, 1, 2, 3, dtype=torch.bool), 1.0
    )
    assert shares[0, 0].tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]


@pytest.mark.cpu_only
def test_an_output_may_be_the_memory_of_an_input():
    scores, grads = drawn((1, 1, 9, 70), torch.float32), drawn((1, 1, 9, 70), torch.float32, seed=1)
    shares = torch.ops.llmctl.scaled_causal_softmax(scores, SCALE)
    expected = torch.ops.llmctl.scaled_softmax_backward(grads, shares, SCALE, True)
    found, gradient = scores.clone(), grads.clone()
    call("llmctl_cpu_scaled_causal_softmax", torch.float32, found, found, 9, 70, SCALE, 0, 9)
    call("llmctl_cpu_scaled_softmax_backward", torch.float32, gradient, found, gradient, 9, 70, SCALE, 1, 0, 9)
    check_same_bits([found, gradient], [shares, expected])


@pytest.mark.cpu_only
def test_rows_beyond_two_to_the_31_elements():
    queries, width = (1 << 21) + 3, 1024
    scores, shares, grads = (sparse_tensor((queries, width), torch.bfloat16) for _ in range(3))
    mask = sparse_tensor((queries, width), torch.uint8)
    few = drawn((2, width), torch.bfloat16)
    scores[-2:], mask[-1, ::2] = few, 1
    rows = (queries - 2, queries)
    call(
        "llmctl_cpu_scaled_masked_softmax",
        *(torch.bfloat16, scores, mask, shares, 1, queries, width, 0, 0, width, SCALE, *rows),
    )
    call("llmctl_cpu_scaled_softmax_backward", torch.bfloat16, scores, shares, grads, queries, width, SCALE, 0, *rows)
    alone = torch.ops.llmctl.scaled_masked_softmax(few[None, None], mask[-2:].bool()[None, None], SCALE)
    expected = torch.ops.llmctl.scaled_softmax_backward(few[None, None], alone, SCALE, False)
    check_same_bits([shares[-2:], grads[-2:]], [alone[0, 0], expected[0, 0]])
    call("llmctl_cpu_scaled_causal_softmax", torch.bfloat16, scores, shares, 3, width, SCALE, *rows)
    alone = torch.ops.llmctl.scaled_causal_softmax(torch.cat((few, few[:1])), SCALE)  # 2^21 + 1 = 3 x 699,051
    check_same_bits([shares[-2:]], [alone[:2]])
    assert not shares[:2].any()
    assert not shares[queries - 4 : queries - 2].any()


def test_mismatched_arguments_are_refused():
    softmax, scores = torch.ops.llmctl.scaled_masked_softmax, torch.zeros(2, 3, 4, 5)
    with pytest.raises(RuntimeError, match="not \\[batch, heads, queries, keys\\]"):
        softmax(scores[0], torch.zeros(3, 4, 5, dtype=torch.bool), 1.0)
    with pytest.raises(RuntimeError, match="the mask is not boolean"):
        softmax(scores, torch.zeros(2, 1, 4, 5), 1.0)
    with pytest.raises(RuntimeError, match="the mask has 1 keys, the scores have 5"):
        softmax(scores, torch.zeros(2, 1, 4, 1, dtype=torch.bool), 1.0)
    with pytest.raises(RuntimeError, match="the mask has 2 entries in dim 1, neither 1 nor the 3 of the scores"):
        softmax(scores, torch.zeros(2, 2, 4, 5, dtype=torch.bool), 1.0)
    with pytest.raises(RuntimeError, match="grad_shares has another shape"):
        torch.ops.llmctl.scaled_softmax_backward(scores[0], scores, 1.0, True)
