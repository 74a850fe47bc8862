"""Self-test of an implementation on small examples before use.

Finds builds that are wrong or made for another GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainer.ops.operation import Backend, Operation

_WORSE = 2.0
"""Allowed error as a multiple of the reference's error."""
_SLACK = 4.0
"""Allowed additional rounding error, in units of the dtype's epsilon."""


def self_test(operation: Operation[Any], backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare results and gradients of an implementation with the float64 reference.

    The error is the largest difference relative to the largest entry.

    Returns:
        The problem, or None if results and gradients are right.

    Raises:
        RuntimeError: the device no longer works in this process.
    """
    for number, example in enumerate(operation.examples, 1):
        problem = _problem(operation, backend, device, partial(example, device, dtype))
        if problem is not None:
            return problem if len(operation.examples) == 1 else f"{problem} in example {number}"
    return None


def _problem(
    operation: Operation[Any], backend: Backend, device: torch.device, example: Callable[[torch.Generator], Any]
) -> str | None:
    def arguments() -> Any:
        # The generator draws on the CPU, also where torch's default device is a GPU.
        with torch.device("cpu"):
            return example(torch.Generator("cpu").manual_seed(1))

    reference = operation.implementations["reference"].function
    # Catch any error of a library, driver or compiler, and out-of-memory errors of the reference on one rank: the other
    # ranks wait for this rank's result.
    try:
        found = _run(operation, operation.implementations[backend].function, arguments())
        _wait_for(device)  # A fault of the kernel surfaces here and not in a later operation.
        same = _run(operation, reference, arguments())
        exact = _run(operation, reference, _mapped(arguments(), _in_float64))
        return _difference(found, same, exact)
    except Exception as error:
        _check_alive(device, operation.name, backend, error)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_alive(device: torch.device, name: str, backend: Backend, error: Exception) -> None:
    """Raise if a kernel has broken the device: ranks can no longer communicate."""
    try:
        _wait_for(device)
    except Exception:
        raise RuntimeError(
            f"{name} on {backend} has broken {device} for this process in its self-test ({error}); "
            f"set training.kernel_backends.{name} to reference"
        ) from error


def _difference(found: list[torch.Tensor], same: list[torch.Tensor], exact: list[torch.Tensor]) -> str | None:
    for number, (own, usual, right) in enumerate(zip(found, same, exact, strict=True)):
        # float32 results in a bfloat16 run have float32's rounding error.
        eps = torch.finfo(usual.dtype).eps if usual.is_floating_point() else 0.0
        distance, allowed = _error(own, right), _WORSE * _error(usual, right) + _SLACK * eps
        if not distance <= allowed:
            return f"its self-test failed: result {number} is off by {distance:.1e}, more than {allowed:.1e}"
    return None


def _in_float64(argument: torch.Tensor) -> torch.Tensor:
    if not argument.is_floating_point():
        return argument
    return argument.detach().double().requires_grad_(argument.requires_grad)


def _run(operation: Operation[Any], function: Callable[..., Any], arguments: Any) -> list[torch.Tensor]:
    """Results, gradients, and arguments that may be changed in place."""
    # Only non-leaf tensors may be changed in place.
    passed = _mapped(arguments, torch.Tensor.clone)
    results = function(*passed)
    outputs = list(_tensors(results))
    differentiable = [output for output in outputs if output.requires_grad]
    found = [output.detach().clone() for output in outputs]
    if differentiable:
        leaves = [value for value in _tensors(arguments) if value.requires_grad]
        # On the CPU, also where torch's default device is a GPU.
        generator = torch.Generator("cpu").manual_seed(2)
        grads = [
            torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu").to(output)
            for output in differentiable
        ]
        # A scalar has these gradients to the bit; torch imports sympy, for a second, if it is given gradients.
        scalar = torch.stack([(output * grad).sum() for output, grad in zip(differentiable, grads, strict=True)]).sum()
        found += torch.autograd.grad(scalar, leaves)
    else:
        found += _tensors([value for place, value in enumerate(passed) if place not in operation.consumed])
    assert found, "there is nothing to compare"
    return found


def _mapped(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to all tensors, also in lists and tuples."""
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(value, change) for value in values])
    return values


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    difference = (found.double() - right.double()).abs()
    return float(difference.max() / right.double().abs().max().clamp(min=1e-30)) if right.numel() else 0.0
