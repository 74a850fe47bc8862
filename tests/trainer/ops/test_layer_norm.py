"""LayerNorm on CPUs: errors, gradients, layouts, instruction sets and threads."""

import pytest
import torch

from tests.trainer.ops.op_checks import (
    SHAPES,
    call,
    check_against_oracle,
    check_gradients,
    check_same_bits,
    check_threads,
    drawn,
    sparse_tensor,
)
from trainer.ops.layer_norm import LAYER_NORM

pytestmark = pytest.mark.usefixtures("kernel_library")

EPSILON = 1e-5
NATIVE = LAYER_NORM.implementations["native"].function


def arguments(shape, dtype):
    hidden, weight, bias = drawn(shape, dtype), drawn(shape[-1:], dtype, seed=1), drawn(shape[-1:], dtype, seed=2)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), EPSILON


def formula(hidden, weight, bias, epsilon):
    """The equation in torch operations, with autograd's gradient."""
    centred = hidden - hidden.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight + bias


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] > 1], ids=str)
def test_errors_are_those_of_rounding(shape, dtype):
    check_against_oracle(LAYER_NORM, "native", arguments(shape, dtype), oracle=formula)


@pytest.mark.usefixtures("level")
def test_rows_of_one_element_are_the_bias(dtype):
    """The bound is the rounding of cancelling terms; a 0 has no relative error."""
    values = arguments((7, 1), dtype)
    gradient = drawn((7, 1), dtype, seed=3)
    normed = NATIVE(*values)
    of_hidden, of_weight, of_bias = torch.autograd.grad(normed, values[:3], gradient)
    assert torch.equal(normed, values[2].expand(7, 1))
    cancelling = gradient * values[1] * EPSILON**-0.5
    assert (of_hidden.abs() <= 2 * torch.finfo(dtype).eps * cancelling.abs()).all()
    assert not of_weight.any()
    assert torch.allclose(of_bias, gradient.sum(0), rtol=4 * torch.finfo(dtype).eps)


def test_gradients_are_those_of_finite_differences():
    check_gradients(NATIVE, arguments((3, 5), torch.float64))


def test_bits_do_not_depend_on_threads(dtype):
    check_threads(NATIVE, arguments((1037, 300), dtype))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("width", [5, 77, 512, 1030])
def test_storing_past_the_caches_changes_nothing(width, dtype):
    kept, past = [], []
    for past_caches, found in enumerate((kept, past)):
        hidden, gradient = (drawn((7, width), dtype, seed=seed) for seed in (1, 2))
        weight, bias = (drawn((width,), dtype, seed=seed) for seed in (3, 4))
        # Not aligned to a cache line, between elements that must not change.
        normed, grad_hidden = drawn((7 * width + 9,), dtype), drawn((7 * width + 9,), dtype)
        sizes, wide = (7, 7, width, width), torch.promote_types(dtype, torch.float32)
        mean, scale, grad_weight, grad_bias = (torch.zeros(size, dtype=wide) for size in sizes)
        forward = (hidden, weight, bias, normed[3:], mean, scale, width, EPSILON)
        backward = (gradient, hidden, weight, mean, scale, grad_hidden[3:], grad_weight, grad_bias, width)
        call("llmctl_cpu_layer_norm", dtype, *forward, 0, 7, past_caches)
        call("llmctl_cpu_layer_norm_backward", dtype, *backward, 0, 7, past_caches)
        found += [normed, mean, scale, grad_hidden, grad_weight, grad_bias]
        beside = drawn((7 * width + 9,), dtype)
        for written in (normed, grad_hidden):
            assert torch.equal(written[:3], beside[:3])
            assert torch.equal(written[-6:], beside[-6:])
    check_same_bits(past, kept)


@pytest.mark.usefixtures("level")
def test_a_large_mean_costs_no_more_digits_than_torch_loses():
    hidden, *rest = arguments((16, 1000), torch.float32)
    check_against_oracle(LAYER_NORM, "native", ((hidden.detach() + 1e4).requires_grad_(), *rest), oracle=formula)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_two_to_the_31_elements(dtype):
    rows, width = (1 << 21) + 3, 1024
    hidden, normed, grad_hidden = (sparse_tensor((rows, width), dtype) for _ in range(3))
    mean, scale = sparse_tensor((rows,), torch.float32), sparse_tensor((rows,), torch.float32)
    few, weight, bias = (drawn(shape, dtype, seed=len(shape)) for shape in ((2, width), (width,), (width,)))
    grad_weight, grad_bias = torch.zeros(width), torch.zeros(width)
    hidden[-2:] = few
    call(
        "llmctl_cpu_layer_norm",
        *(dtype, hidden, weight, bias, normed, mean, scale, width, EPSILON, rows - 2, rows, 0),
    )
    call(
        "llmctl_cpu_layer_norm_backward",
        *(dtype, normed, hidden, weight, mean, scale, grad_hidden, grad_weight, grad_bias, width, rows - 2, rows, 1),
    )
    alone, *statistics = torch.ops.llmctl.layer_norm(few, weight, bias, EPSILON)
    gradients = torch.ops.llmctl.layer_norm_backward(alone, few, weight, *statistics)
    found = [normed[-2:], mean[-2:], scale[-2:], grad_hidden[-2:], grad_weight.to(dtype), grad_bias.to(dtype)]
    check_same_bits(found, [alone, *statistics, *gradients])
    assert not normed[rows - 4 : rows - 2].any()


def test_mismatched_arguments_are_refused():
    hidden, weight = torch.ones(3, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match="bias has 7 elements, not one for each of the 8 channels"):
        torch.ops.llmctl.layer_norm(hidden, weight, torch.ones(7), EPSILON)
    with pytest.raises(RuntimeError, match="weight has another dtype"):
        torch.ops.llmctl.layer_norm(hidden, weight.double(), weight, EPSILON)
