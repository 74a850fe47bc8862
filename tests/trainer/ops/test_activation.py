"""Activations: errors, gradients, edge cases, and layers that use them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded
from tests.trainer.ops.op_checks import (
    SHAPES,
    call,
    check_against_oracle,
    check_gradients,
    check_same_bits,
    check_threads,
    drawn,
    interface,
    run,
    sparse_tensor,
)
from trainer.ops.activation import ACTIVATION, Activation, GateLimits, _native
from trainer.ops.operation import Backend, Implementation

pytestmark = pytest.mark.usefixtures("kernel_library")

FORMS: tuple[tuple[Activation, bool], ...] = (
    ("silu", True),
    ("gelu", True),
    ("gelu_tanh", True),
    ("gelu", False),
    ("gelu_tanh", False),
    ("silu", False),
    ("squared_relu", False),
    ("relu", True),
    ("relu", False),
    ("squared_relu", True),
)
SMOOTH: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")

# LLMCTL_V4_BFLOAT16 in csrc/common/cpu/isa.h.
_BY_INSTRUCTION = 3

KINDS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "squared_relu": 4}


# The kernel, also for calls that the operation leaves to torch.
LIBRARY = replace(ACTIVATION, implementations={**ACTIVATION.implementations, "native": Implementation(_native)})
SMALL = replace(ACTIVATION, implementations={**ACTIVATION.implementations, "torch": Implementation(ACTIVATION.small)})


def formula(
    inner: torch.Tensor, bias: torch.Tensor | None, row_weight: torch.Tensor | None, kind: Activation, gated: bool
) -> torch.Tensor:
    """The definition in torch operations, with autograd's gradient."""
    inner = inner if bias is None else inner + bias
    gate, up = inner.chunk(2, -1) if gated else (inner, torch.ones_like(inner))
    if kind in ("relu", "squared_relu"):
        share = (gate > 0).to(gate) * (gate if kind == "squared_relu" else 1.0)
    elif kind == "gelu":
        share = torch.special.ndtr(gate)
    elif kind == "gelu_tanh":
        share = torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        share = torch.sigmoid(gate)
    activated = gate * share * up
    return activated if row_weight is None else activated * row_weight.unsqueeze(-1)


def arguments(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: Activation = "silu",
    gated: bool = True,
    *,
    bias: bool = True,
    row_weight: bool = True,
) -> tuple[Any, ...]:
    width = shape[-1] * (2 if gated else 1)
    wide = torch.promote_types(dtype, torch.float32)
    # Values with a standard deviation of 3 reach the flat parts of all functions.
    inner = drawn((*shape[:-1], width), dtype).mul_(3.0).requires_grad_()
    biases = drawn((width,), dtype, seed=1).requires_grad_() if bias else None
    weights = drawn(shape[:-1], wide, seed=2).requires_grad_() if row_weight else None
    return inner, biases, weights, kind, gated


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("kind", "gated"), FORMS)
def test_errors_are_those_of_rounding(kind: Activation, gated: bool, dtype: torch.dtype) -> None:
    # The float64 oracle rounds too.
    slack = 16.0 if dtype is torch.float64 else 4.0
    check_against_oracle(LIBRARY, "native", arguments((5, 1123), dtype, kind, gated), slack=slack, oracle=formula)


@pytest.mark.parametrize(("kind", "gated"), FORMS)
def test_errors_of_small_calls_are_those_of_rounding(kind: Activation, gated: bool, dtype: torch.dtype) -> None:
    check_against_oracle(SMALL, "torch", arguments((5, 123), dtype, kind, gated))


@pytest.mark.cpu_only
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("kind", "gated"), FORMS)
def test_reference_torch_is_right(kind: Activation, gated: bool, backend: Backend) -> None:
    given = arguments((5, 123), torch.float64, kind, gated)
    found, gradients, _ = run(SMALL.implementations[backend].function, given)
    right, *_ = run(formula, given, gradients=gradients)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_rounding_in_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_against_oracle(LIBRARY, "native", arguments(shape, dtype))


@pytest.mark.parametrize(("bias", "row_weight"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "gated"), FORMS[:4])
def test_errors_are_those_of_rounding_without_bias_or_weights(
    kind: Activation, gated: bool, dtype: torch.dtype, bias: bool, row_weight: bool
) -> None:
    check_against_oracle(LIBRARY, "native", arguments((7, 640), dtype, kind, gated, bias=bias, row_weight=row_weight))


@pytest.mark.parametrize(("kind", "gated"), FORMS)
def test_gradients_are_those_of_finite_differences(kind: Activation, gated: bool) -> None:
    check_gradients(_native, arguments((3, 5), torch.float64, kind, gated))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    check_threads(_native, arguments((403, 1024), dtype))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", SMOOTH)
def test_float32_is_right_to_a_few_units_in_the_last_place(kind: Activation) -> None:
    # Left of -3, where GeLU is above -0.005, its error grows with the square: see csrc/common/scalar_math.h.
    # Eager's is more than a hundred times as large there.
    inner = torch.linspace(-3.0, 12.0, 100_003)
    found, slope = _value_and_slope(inner, kind, _native)
    right, right_slope = _value_and_slope(inner.double(), kind, formula)
    epsilon = torch.finfo(torch.float32).eps
    assert ((found - right) / right).abs()[inner != 0].max() < 8 * epsilon
    assert ((found - right) / right).abs()[inner > 0].max() < 4 * epsilon
    assert (slope - right_slope).abs().max() < 3 * epsilon


def _value_and_slope(
    inner: torch.Tensor, kind: Activation, function: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = inner.clone().requires_grad_()
    result = function(leaf.unsqueeze(0), None, None, kind, False)
    (slope,) = torch.autograd.grad(result.sum(), leaf)
    return result.detach().squeeze(0).double(), slope.double()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", SMOOTH)
def test_far_out_functions_are_zero_or_their_argument(kind: Activation, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max / 2
    inner = torch.tensor([[-largest, -2000.0, -1000.0, -0.0, 1000.0, 2000.0, largest, math.nan]], dtype=dtype)
    inner.requires_grad_()
    result = _native(inner, None, None, kind, False)
    (slope,) = torch.autograd.grad(result, inner, torch.ones_like(result))
    assert torch.equal(result[0, :-1], inner[0, :-1].clamp(min=0))
    assert torch.equal(slope[0, :-1], torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], dtype=dtype))
    assert result[0, -1].isnan() and slope[0, -1].isnan()


@pytest.mark.parametrize(("kind", "squared"), [("relu", False), ("squared_relu", True)])
def test_far_out_relu_is_zero_or_its_argument(kind: Activation, squared: bool, dtype: torch.dtype) -> None:
    inner = torch.tensor([[-math.inf, -2000.0, -0.0, 0.0, 64.0, math.nan]], dtype=dtype).requires_grad_()
    result = _native(inner, None, None, kind, False)
    (slope,) = torch.autograd.grad(result, inner, torch.ones_like(result))
    assert result[0, :-1].tolist() == [0.0, 0.0, 0.0, 0.0, 4096.0 if squared else 64.0]
    assert slope[0, :-1].tolist() == [0.0, 0.0, 0.0, 0.0, 128.0 if squared else 1.0]
    assert result[0, -1].isnan()


LIMITS = (GateLimits(7.0, 1.702), GateLimits(7.0), GateLimits(alpha=1.702))


@pytest.mark.cpu_only
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_limits_of_gates_are_those_of_gpt_oss(limits: GateLimits, backend: Backend) -> None:
    inner, bias, weights, kind, gated = arguments((5, 123), torch.float64)
    with torch.no_grad():
        inner.mul_(3.0)
    gate, up = (inner + bias).chunk(2, -1)
    assert ((gate > 7).any() and (up > 7).any() and (up < -7).any()).item()
    if limits.clamp is not None:
        gate, up = torch.minimum(gate, torch.tensor(7.0)), torch.clamp(up, -7.0, 7.0)
    alpha = limits.alpha or 1.0
    expected = gate * torch.sigmoid(alpha * gate) * (up + (limits.alpha is not None)) * weights.unsqueeze(-1)
    activated = SMALL.implementations[backend].function(inner, bias, weights, kind, gated, limits)
    torch.testing.assert_close(activated, expected, rtol=1e-12, atol=1e-13)
    grads = drawn(tuple(expected.shape), torch.float64, seed=3)
    leaves = (inner, bias, weights)
    for found, right in zip(
        torch.autograd.grad(activated, leaves, grads), torch.autograd.grad(expected, leaves, grads), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)


@pytest.mark.cpu_only
@pytest.mark.parametrize("width", [1, 15, 17, 31, 33, 300])
def test_an_instruction_rounds_to_the_end_of_a_row_and_no_further(width: int) -> None:
    """AVX512_BF16 gives the loops' bits, but flushes subnormal numbers in the whole row."""
    library = interface()
    before = library.llmctl_cpu_level()
    if before < _BY_INSTRUCTION:
        pytest.skip("this processor lacks AVX512_BF16")
    inner = drawn((3, 2 * width), torch.bfloat16)
    inner[2, :width], inner[2, width:] = 1.0, 1e-39
    found = []
    try:
        for level in (_BY_INSTRUCTION - 1, _BY_INSTRUCTION):
            assert library.llmctl_cpu_set_level(level) == level
            found.append(guarded(torch.full((3, width), torch.nan, dtype=torch.bfloat16)))
            call(
                "llmctl_cpu_activation", torch.bfloat16, KINDS["silu"], 1, inner, None, None, found[-1], width, 0, 3, 0
            )
    finally:
        library.llmctl_cpu_set_level(before)
    by_loop, by_instruction = found
    assert torch.equal(by_instruction[:2], by_loop[:2])
    assert by_loop[2].all() and not by_instruction[2].any()


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("kind", "gated"), [("silu", True), ("gelu", False), ("gelu_tanh", True)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [5, 77, 512])
def test_storing_past_the_caches_changes_nothing(
    width: int, kind: str, gated: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    size = 2 * width if gated else width
    inner, gradient = drawn((7, size), dtype, seed=1), drawn((7, width), dtype, seed=2)
    bias = drawn((size,), dtype, seed=3) if has_bias else None
    found = []
    for past_caches in (0, 1):
        # Not aligned to a cache line, between elements that must not change.
        activated, grad_inner = (drawn((7 * own + 9,), dtype) for own in (width, size))
        grad_bias = torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32))
        rest = (inner, bias, None)
        call("llmctl_cpu_activation", dtype, KINDS[kind], gated, *rest, activated[3:], width, 0, 7, past_caches)
        of_bias = grad_bias if has_bias else None
        backward = (KINDS[kind], gated, gradient, *rest, grad_inner[3:], of_bias, None, width, 0, 7, past_caches)
        call("llmctl_cpu_activation_backward", dtype, *backward)
        for written in (activated, grad_inner):
            beside = drawn(tuple(written.shape), dtype)
            assert torch.equal(written[:3], beside[:3])
            assert torch.equal(written[-6:], beside[-6:])
        found.append([activated, grad_inner, grad_bias])
    check_same_bits(*found)


@pytest.mark.cpu_only
def test_rows_beyond_two_to_the_31_elements() -> None:
    rows, width = 2200, 1 << 19
    inner = sparse_tensor((rows, 2 * width), torch.bfloat16)
    activated = sparse_tensor((rows, width), torch.bfloat16)
    inner[-1] = drawn((2 * width,), torch.bfloat16)
    call("llmctl_cpu_activation", torch.bfloat16, 0, 1, inner, None, None, activated, width, rows - 1, rows, 0)
    expected = _native(inner[-1:], None, None, "silu", True)
    assert torch.equal(activated[-1:], expected)
    grad_inner = sparse_tensor((rows, 2 * width), torch.bfloat16)
    call(
        "llmctl_cpu_activation_backward",
        *(torch.bfloat16, 0, 1, activated, inner, None, None, grad_inner, None, None, width, rows - 1, rows, 1),
    )
    grad, *_ = torch.ops.llmctl.activation_backward(activated[-1:], inner[-1:], None, None, 0, True)
    assert torch.equal(grad_inner[-1:], grad)


def test_calls_that_torch_computes_in_one_kernel_use_torch() -> None:
    inner, *_ = arguments((3, 8), torch.float32, gated=False)
    own = ACTIVATION.implementations["native"].function
    for kind in KINDS:
        name = type(own(inner, None, None, kind, False).grad_fn).__name__
        of_torch = name in ("GeluBackward0", "SiluBackward0", "ReluBackward0")
        assert of_torch is (kind in ("gelu", "relu") or (inner.is_cuda and kind != "squared_relu"))
        assert "llmctl" in type(own(inner, torch.zeros(8), None, kind, False).grad_fn).__name__


def test_mismatched_arguments_are_refused() -> None:
    run = partial(torch.ops.llmctl.activation, kind=0, gated=True)
    with pytest.raises(RuntimeError, match="not pairs"):
        run(torch.zeros(2, 5), None, None)
    with pytest.raises(RuntimeError, match="3 elements, not one for each of the 4 channels"):
        run(torch.zeros(2, 4), torch.zeros(3), None)
    with pytest.raises(RuntimeError, match="3 row weights for 2 rows"):
        run(torch.zeros(2, 4), None, torch.zeros(3))
    with pytest.raises(RuntimeError, match="no activation 5"):
        torch.ops.llmctl.activation(torch.zeros(2, 4), None, None, 5, True)
