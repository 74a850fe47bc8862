"""Checks for every operation, parametrized by the operation's test file.

A test file needs the built library (the fixture ``kernel_library``), its Operation and a function that makes arguments:

    pytestmark = pytest.mark.usefixtures("kernel_library")

    def arguments(shape, dtype):
        hidden, weight = drawn(shape, dtype), drawn(shape[-1:], dtype, seed=1)
        return hidden.requires_grad_(), weight.requires_grad_(), 1e-5

    @pytest.mark.parametrize("shape", SHAPES)
    def test_errors_are_those_of_rounding(shape, dtype, level):
        check_against_oracle(RMS_NORM, "native", arguments(shape, dtype))

where ``dtype`` and ``level`` are fixtures of conftest.py, which repeat a test over all dtypes and instruction sets. The
following checks are for one or two shapes each: check_against_oracle(..., layout=layout) with another fixture,
check_gradients (tiny, float64), check_threads (large enough to be divided), and, with ``call`` and ``sparse_tensor``,
the C interface beyond 2^31 elements. Checks of all operations together are in test_operations.py:

    hidden, normed = sparse_tensor((rows, width), dtype), sparse_tensor((rows, width), dtype)
    hidden[-2:] = ...
    call("llmctl_cpu_rms_norm", dtype, hidden, None, weight, None, normed, scale, width, 1e-5, 0, rows - 2, rows, 0)

gpu_plugin.py runs the same files on a GPU. Therefore tests make tensors with ``drawn``, with ``here``, or with torch's
functions without a device argument, which use torch's default device. Tests of the CPU kernels are marked ``cpu_only``.
check_errors applies the same error rule to implementations that are called in another way, such as emulated kernels.

The error rule: relative to the float64 result, in the L2 norm and in the largest entry, the error of an implementation
may be twice the error of reference torch in the same dtype, plus ``slack`` units of the dtype's epsilon. The rule needs
no absolute scale, and lost digits violate it in every dtype; flash-attention's tests compare largest entries alike. In
float64 both references are the same and round too, in an order that depends on the processor: ``slack`` counts 8 times.
While an implementation runs, uninitialised memory is NaN.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from trainer.ops.operation import Backend, Operation

Arguments = tuple[Any, ...]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((1, 1), (1, 17), (7, 1), (5, 123), (3, 8191), (8191, 3), (2, 3, 40), (0, 64))
LAYOUTS = ("contiguous", "strided", "transposed", "unaligned", "expanded gradients")
LEVELS = {"portable": 0, "v3": 1, "v4": 2}
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""csrc/common/dtype.h."""


def here(values: torch.Tensor) -> torch.Tensor:
    """Move a tensor from the CPU to the device of the tests."""
    return values.to(torch.get_default_device())


def drawn(shape: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Normally distributed tensor, equal on every device and, up to rounding, in every dtype."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return here(torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu").to(dtype))


def check_against_oracle(
    operation: Operation,
    backend: Backend,
    arguments: Arguments,
    *,
    layout: str = "contiguous",
    slack: float = 4.0,
    oracle: Callable[..., Any] | None = None,
    consumes: bool = False,
) -> None:
    """Check results and gradients by the error rule, and that arguments are unchanged.

    Args:
        operation: the operation.
        backend: backend of the implementation.
        arguments: tensors that require a gradient are differentiated. Without such tensors, arguments that are changed
            in place count as results. Arguments may be lists of tensors.
        layout: one of LAYOUTS, for all tensors among the arguments and gradients.
        slack: allowed error beyond twice the reference's error, in units of epsilon.
        oracle: function that is run in float64; by default the reference implementation.
        consumes: True if the implementation may change differentiated arguments.
    """
    reference = operation.implementations["reference"].function
    with poisoned():
        found, gradients, intact = run(operation.implementations[backend].function, arguments, layout=layout)
    usual, *_ = run(reference, arguments, gradients=gradients)
    right, *_ = run(oracle or reference, in_float64(arguments), gradients=gradients)
    check_errors(found, usual, right, slack=slack)
    assert intact or consumes, "an argument was changed"


def check_errors(
    found: Sequence[torch.Tensor], usual: Sequence[torch.Tensor], right: Sequence[torch.Tensor], *, slack: float = 4.0
) -> None:
    """Check each of the results ``found`` by the error rule.

    Args:
        found: results under test.
        usual: results of reference torch in the same dtypes. Results that are not floating-point must be equal.
        right: results of the reference in float64.
        slack: allowed error beyond twice the reference's error, in units of epsilon.
    """
    for number, (own, reference, exact) in enumerate(zip(found, usual, right, strict=True)):
        assert (own.shape, own.dtype) == (reference.shape, reference.dtype), f"result {number}"
        if not own.is_floating_point():
            assert torch.equal(own, reference), f"result {number}"
            continue
        epsilon = torch.finfo(own.dtype).eps * (8 if own.dtype == exact.dtype else 1)
        for norm in (2.0, math.inf):
            distance, allowed = _error(own, exact, norm), 2.0 * _error(reference, exact, norm) + slack * epsilon
            assert distance <= allowed, (
                f"result {number} is off by {distance:.2e} in norm {norm}, allowed {allowed:.2e}"
            )


def check_gradients(function: Callable[..., Any], arguments: Arguments) -> None:
    """Check gradients against finite differences in float64, for a few dozen elements."""

    def on_copies(*values: Any) -> Any:
        return function(*mapped(torch.clone, values))

    assert torch.autograd.gradcheck(on_copies, mapped(_leaf, in_float64(arguments)))


def check_threads(function: Callable[..., Any], arguments: Arguments) -> None:
    """Check that 1, 2 and 3 threads give the same bits."""
    assert sum(value.numel() for value in tensors_of(arguments)) >= 1 << 18, "too small to be divided among threads"
    before = torch.get_num_threads()
    outcomes = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outcomes.append(run(function, arguments)[0])
    finally:
        torch.set_num_threads(before)
    for outcome in outcomes[1:]:
        check_same_bits(outcome, outcomes[0])


def check_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Check that every result is bit-identical."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"result {number}"


def run(
    function: Callable[..., Any],
    arguments: Arguments,
    *,
    layout: str = "contiguous",
    gradients: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Run forward and backward.

    Args:
        function: called with copies of the arguments, which it may change in place.
        arguments: never changed.
        layout: memory layout of the copies and of the gradients.
        gradients: gradients of the differentiable results; None: drawn.

    Returns:
        The results, then the gradients of the arguments that require one, or without such arguments the arguments
        after the call; the given or drawn gradients; True if the arguments are unchanged.
    """
    elsewhere = {value.device.type for value in tensors_of(arguments)} - {torch.get_default_device().type}
    assert not elsewhere, f"an argument lies on {elsewhere.pop()}: the test would not run on the GPU"
    leaves = mapped(_leaf, arguments)
    passed = mapped(lambda value: _LaidOut.apply(value, layout), leaves)
    outputs = list(tensors_of(function(*passed)))
    results = [output.detach().clone() for output in outputs]
    requested = [leaf for leaf in tensors_of(leaves) if leaf.requires_grad]
    drawn_gradients: list[torch.Tensor] = []
    if requested:
        differentiable = [output for output in outputs if output.requires_grad]
        given = gradients or [_gradient(output, number, layout) for number, output in enumerate(differentiable)]
        drawn_gradients = [one.to(output) for one, output in zip(given, differentiable, strict=True)]
        results += torch.autograd.grad(differentiable, requested, [_laid_out(one, layout) for one in drawn_gradients])
    else:
        results += [value.clone() for value in tensors_of(passed)]
    intact = all(torch.equal(*pair) for pair in zip(tensors_of(passed), tensors_of(arguments), strict=True))
    return results, drawn_gradients, intact


def in_float64(arguments: Arguments) -> Arguments:
    """Convert the floating-point tensors among the arguments to float64."""
    return mapped(
        lambda value: value.detach().double().requires_grad_(value.requires_grad) if _floats(value) else value,
        arguments,
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory of torch with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.zeros(1).new_empty(1).isnan(), "this torch does not fill what is uninitialised"
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def interface() -> ctypes.CDLL:
    """The C interface of the loaded library."""
    paths = [path for path in torch.ops.loaded_libraries if hasattr(ctypes.CDLL(path), "llmctl_cpu_level")]
    assert paths, "the library is not loaded: the test needs the fixture `kernel_library`"
    return ctypes.CDLL(paths[-1])


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C interface.

    Tensors are passed by address, None as NULL, a dtype by its number, int as int64_t, float as double, others as is.
    """
    function = getattr(interface(), name)
    function.restype = None
    function(*map(as_c, arguments))


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Run kernels on one of LEVELS. Skips the test on processors without it."""
    library = interface()
    before = library.llmctl_cpu_level()
    if library.llmctl_cpu_set_level(LEVELS[level]) != LEVELS[level]:
        library.llmctl_cpu_set_level(before)
        pytest.skip(f"this processor lacks x86-64-{level}")
    try:
        yield
    finally:
        library.llmctl_cpu_set_level(before)


def sparse_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only for touched pages."""
    # Linux's number; Python has the name since 3.11.
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(mapping, dtype=dtype).view(*shape)


class _LaidOut(torch.autograd.Function):
    """A copy with a layout, neither leaf nor view: in-place changes are allowed."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor, layout: str) -> torch.Tensor:
        return _laid_out(values, layout).clone() if layout == "expanded gradients" else _laid_out(values, layout)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "expanded gradients":
        return values
    strides, stride = [0] * values.dim(), 1
    dims = range(values.dim()) if layout == "transposed" else reversed(range(values.dim()))
    for dim in dims:
        strides[dim] = stride * (2 if layout == "strided" else 1)
        stride *= max(1, values.shape[dim])
    memory = values.new_zeros(2 * stride + 1).untyped_storage()
    laid = values.new_empty(0).set_(memory, int(layout == "unaligned"), values.shape, strides)  # type: ignore[call-overload]
    return laid.copy_(values)


def _gradient(output: torch.Tensor, number: int, layout: str) -> torch.Tensor:
    gradient = drawn(output.shape, output.dtype, seed=100 + number)
    if layout == "expanded gradients" and gradient.numel():
        return gradient.flatten()[0].expand(output.shape)
    return gradient


def _error(found: torch.Tensor, right: torch.Tensor, norm: float) -> float:
    """Error relative to ``right``; NaN if an entry is NaN."""
    right = right.double().flatten()
    if not right.numel():
        return 0.0
    distance = torch.linalg.vector_norm(found.double().flatten() - right, norm)
    return float(distance / torch.linalg.vector_norm(right, norm)) if distance != 0 else 0.0


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _floats(value: torch.Tensor) -> bool:
    return value.is_floating_point()


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``change`` to every tensor in ``value``, also in lists and tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(change, one) for one in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)


def as_c(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return ctypes.c_int(DTYPE_NUMBERS[value])
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_double(value) if isinstance(value, float) else value
