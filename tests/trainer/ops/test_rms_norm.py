"""RMSNorm and norm of a sum: errors, gradients, layouts, instruction sets and threads."""

import pytest
import torch

from tests.trainer.ops.op_checks import (
    SHAPES,
    call,
    check_against_oracle,
    check_errors,
    check_gradients,
    check_same_bits,
    check_threads,
    drawn,
    in_float64,
    run,
    sparse_tensor,
)
from trainer.ops.rms_norm import ADD_RMS_NORM, RMS_NORM

pytestmark = pytest.mark.usefixtures("kernel_library")

EPSILON = 1e-5


@pytest.fixture(params=[RMS_NORM, ADD_RMS_NORM], ids=lambda operation: operation.name)
def operation(request):
    return request.param


def norm_arguments(shape, dtype):
    hidden, weight = drawn(shape, dtype), drawn(shape[-1:], dtype, seed=1)
    return hidden.requires_grad_(), weight.requires_grad_(), EPSILON


def arguments(operation, shape, dtype, *adds_one):
    hidden, *rest = norm_arguments(shape, dtype)
    rest += adds_one
    return (hidden, *([drawn(shape, dtype, seed=2).requires_grad_()] if operation is ADD_RMS_NORM else []), *rest)


def formula(hidden, weight, epsilon, adds_one=False):
    """The equation in torch operations, with autograd's gradient."""
    weight = weight + 1 if adds_one else weight
    return hidden * (hidden.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def formula_of_sum(hidden, residual, weight, epsilon, adds_one=False):
    return formula(hidden + residual, weight, epsilon, adds_one), hidden + residual


ORACLES = {"rms_norm": formula, "add_rms_norm": formula_of_sum}


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_those_of_rounding(operation, shape, dtype):
    check_against_oracle(operation, "native", arguments(operation, shape, dtype), oracle=ORACLES[operation.name])


@pytest.mark.parametrize("shape", [(5, 123), (0, 64)], ids=str)
def test_errors_of_torch_are_those_of_rounding(operation, shape, dtype):
    check_against_oracle(operation, "torch", arguments(operation, shape, dtype), oracle=ORACLES[operation.name])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("shape", [(5, 123), (9, 4104), (0, 64)], ids=str)
def test_a_factor_of_1_plus_weight_is_not_rounded(operation, shape, dtype, backend):
    values = arguments(operation, shape, dtype, True)
    check_against_oracle(operation, backend, values, oracle=ORACLES[operation.name])


def test_small_weights_beside_1_count_in_16_bit(operation):
    """1 + 2^-8 is not a bfloat16: rounded before the product, the weight would be lost."""
    hidden = torch.full((1, 64), 1.5, dtype=torch.bfloat16)
    weight = torch.full((64,), 2.0**-8, dtype=torch.bfloat16)
    # 1.5^2 - 1.25 = 1: the row keeps its values.
    values = (hidden, weight, -1.25) if operation is RMS_NORM else (hidden, torch.zeros_like(hidden), weight, -1.25)
    for backend in ("native", "torch", "reference"):
        normed = operation.implementations[backend].function(*values, True)
        assert ((normed if operation is RMS_NORM else normed[0]) == 1.5078125).all()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_gradients_are_those_of_finite_differences(operation, backend):
    for adds_one in (False, True):
        values = arguments(operation, (3, 5), torch.float64, adds_one)
        check_gradients(operation.implementations[backend].function, values)


@pytest.mark.cpu_only
def test_bits_do_not_depend_on_threads(operation, dtype):
    check_threads(operation.implementations["native"].function, arguments(operation, (1037, 300), dtype))


@pytest.mark.usefixtures("level")
def test_the_norm_of_a_sum_has_the_bits_of_the_norm_alone(dtype):
    """Backward may recompute the norm of the saved sum."""
    hidden, residual, weight, _ = arguments(ADD_RMS_NORM, (7, 513), dtype)
    with torch.no_grad():
        normed, total = ADD_RMS_NORM.implementations["native"].function(hidden, residual, weight, EPSILON)
        check_same_bits([total, normed], [hidden + residual, torch.ops.llmctl.rms_norm(total, weight, EPSILON)[0]])


def test_rows_of_one_block_of_several_warps_on_a_gpu(operation):
    """Consecutive block sums must not overwrite each other's shared memory too early."""
    check_against_oracle(operation, "native", arguments(operation, (16, 4096), torch.bfloat16))


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_or_its_norm_may_be_unused(used):
    values = arguments(ADD_RMS_NORM, (5, 33), torch.float64)
    found, expected = (
        torch.autograd.grad(
            ADD_RMS_NORM.implementations[backend].function(*values)[used].square().sum(), values[:3], allow_unused=True
        )
        for backend in ("native", "reference")
    )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("width", [5, 77, 512, 1030])
def test_storing_past_the_caches_changes_nothing(width, dtype):
    kept, past = [], []
    for past_caches, found in enumerate((kept, past)):
        hidden, residual, gradient = (drawn((7, width), dtype, seed=seed) for seed in (1, 2, 3))
        # Not aligned to a cache line, between elements that must not change.
        total, normed, grad_hidden = (drawn((7 * width + 9,), dtype) for _ in range(3))
        weight = drawn((width,), dtype, seed=4)
        scale, grad_weight = (torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32)) for size in (7, width))
        sum_to, normed_to, grad_to = total[3:], normed[3:], grad_hidden[3:]
        forward = (hidden, residual, weight, sum_to, normed_to, scale, width, EPSILON, 0)
        backward = (gradient, residual, sum_to, weight, scale, grad_to, grad_weight, width, 0)
        call("llmctl_cpu_rms_norm", dtype, *forward, 0, 7, past_caches)
        call("llmctl_cpu_rms_norm_backward", dtype, *backward, 0, 7, past_caches)
        found += [total, normed, scale, grad_hidden, grad_weight]
        beside = drawn((7 * width + 9,), dtype)
        for written in (total, normed, grad_hidden):
            assert torch.equal(written[:3], beside[:3])
            assert torch.equal(written[-6:], beside[-6:])
    check_same_bits(past, kept)


@pytest.mark.cpu_only
def test_an_output_may_be_the_memory_of_an_input():
    hidden, residual, weight = drawn((5, 77), torch.float32), drawn((5, 77), torch.float32, seed=1), torch.ones(77)
    normed, total, scale = torch.ops.llmctl.add_rms_norm(hidden, residual, weight, EPSILON)
    grads = torch.ops.llmctl.rms_norm_backward(residual, hidden, total, weight, scale)
    first, second, again = hidden.clone(), residual.clone(), torch.empty(5)
    call("llmctl_cpu_rms_norm", torch.float32, first, second, weight, first, second, again, 77, EPSILON, 0, 0, 5, 0)
    check_same_bits([first, second, again], [total, normed, scale])
    gradient, grad_weight = residual.clone(), torch.zeros(77)
    call(
        "llmctl_cpu_rms_norm_backward",
        *(torch.float32, gradient, hidden, total, weight, scale, gradient, grad_weight, 77, 0, 0, 5, 0),
    )
    check_same_bits([gradient, grad_weight], grads)


def test_large_values_survive_16_bit_and_nan_stays():
    for dtype, size in ((torch.bfloat16, 1e18), (torch.float16, 65504.0), (torch.bfloat16, -100.0)):
        huge = torch.full((1, 64), size, dtype=dtype)
        normed, _ = torch.ops.llmctl.rms_norm(huge, torch.ones(64, dtype=dtype), EPSILON)
        assert torch.equal(normed, huge.sign())
    normed, _ = torch.ops.llmctl.rms_norm(torch.full((1, 8), float("nan")), torch.ones(8), EPSILON)
    assert normed.isnan().all()


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_two_to_the_31_elements(dtype):
    rows, width = (1 << 21) + 3, 1024
    hidden, normed, grad_hidden = (sparse_tensor((rows, width), dtype) for _ in range(3))
    scale, weight = sparse_tensor((rows,), torch.float32), drawn((width,), dtype, seed=1)
    few, grad_weight = drawn((2, width), dtype), torch.zeros(width)
    hidden[-2:] = few
    call(
        "llmctl_cpu_rms_norm",
        *(dtype, hidden, None, weight, None, normed, scale, width, EPSILON, 0, rows - 2, rows, 0),
    )
    call(
        "llmctl_cpu_rms_norm_backward",
        *(dtype, normed, None, hidden, weight, scale, grad_hidden, grad_weight, width, 0, rows - 2, rows, 1),
    )
    alone, factor = torch.ops.llmctl.rms_norm(few, weight, EPSILON)
    gradient, of_weight = torch.ops.llmctl.rms_norm_backward(alone, None, few, weight, factor)
    found = [normed[-2:], scale[-2:], grad_hidden[-2:], grad_weight.to(dtype)]
    check_same_bits(found, [alone, factor, gradient, of_weight])
    assert not normed[:2].any()
    assert not normed[rows - 4 : rows - 2].any()


def test_mismatched_arguments_are_refused():
    hidden, weight = torch.ones(3, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match="weight has 7 elements, not one for each of the 8 channels"):
        torch.ops.llmctl.rms_norm(hidden, torch.ones(7), EPSILON)
    with pytest.raises(RuntimeError, match="weight has another dtype"):
        torch.ops.llmctl.rms_norm(hidden, weight.double(), EPSILON)
    with pytest.raises(RuntimeError, match="residual has another shape"):
        torch.ops.llmctl.add_rms_norm(hidden, torch.ones(4, 8), weight, EPSILON)
    with pytest.raises(RuntimeError, match="takes float32, bfloat16, float16 and float64 only"):
        torch.ops.llmctl.rms_norm(hidden.int(), weight.int(), EPSILON)


@pytest.mark.cpu_only
def test_the_checks_detect_errors():
    """A wrong sign, a missing row and a lost digit all fail."""
    good = arguments(RMS_NORM, (9, 64), torch.float32)
    usual, gradients, _ = run(RMS_NORM.implementations["reference"].function, good)
    right, *_ = run(formula, in_float64(good), gradients=gradients)
    check_errors(usual, usual, right)
    for number, spoil in [
        (0, lambda x: -x),
        (1, lambda x: x * (1 + 3e-6)),
        (2, lambda x: x.roll(1)),
        (1, torch.zeros_like),
    ]:
        with pytest.raises(AssertionError, match=f"result {number} is off"):
            check_errors([spoil(x) if n == number else x for n, x in enumerate(usual)], usual, right)
    unwritten = [usual[0].clone().index_fill_(0, torch.tensor([4]), float("nan")), *usual[1:]]
    with pytest.raises(AssertionError, match="off by nan"):
        check_errors(unwritten, usual, right)
