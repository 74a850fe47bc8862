"""Operations: name, implementation per backend, and examples for the self-test.

The backends, in the order in which ``auto`` prefers them:
    native: csrc/, compiled for this machine's processor and GPUs.
    torch: torch's fused operation, if that is not the reference.
    reference: plain torch operations, against which all other backends are tested.

To add an operation, write a file that ends with its Operation, and add a row to trainer.planning.kernel_choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from trainer.config.kernel_names import BACKENDS, Backend

__all__ = ["BACKENDS", "FLOATING", "Backend", "BySize", "Example", "Implementation", "Operation"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Function = TypeVar("Function", bound=Callable[..., Any])
"""Signature of an operation."""
Example = Callable[[torch.device, torch.dtype, torch.Generator], tuple[Any, ...]]
"""Makes the arguments of a small call from device, dtype and CPU random generator."""


@dataclass(frozen=True)
class Implementation(Generic[Function]):
    """One way to compute an operation.

    Attributes:
        function: function with the operation's signature; differentiable if the operation is.
        devices: supported device types.
        dtypes: supported dtypes of the activations.
        smallest: device type -> number of elements of the first tensor below which torch's operations are faster and
            are used instead.
    """

    function: Function
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATING
    smallest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation(Generic[Function]):
    """One operation and its implementations.

    Attributes:
        name: name in the config and in reports. Also the op's name in torch.ops.llmctl, unless the operation uses
            several ops.
        implementations: backend -> implementation. Contains ``reference``.
        examples: arguments for the self-test and the tests: odd sizes, which leave remainders in every loop, and
            sizes of training, which take the fast paths: whole vectors, rows of several warps, several rows per
            thread block.
        consumed: positions of the arguments whose contents are undefined after the call.
        default: the backend for a run without a selection.
        small: faster function for calls below an implementation's ``smallest``; None: the reference.
    """

    name: str
    implementations: Mapping[Backend, Implementation[Function]]
    examples: Sequence[Example]
    consumed: tuple[int, ...] = ()
    default: Backend = "reference"
    small: Function | None = None

    def function(self, backend: Backend, device_type: str) -> Function:
        """The function of a run on ``backend``: the faster function for each size."""
        large = self.implementations[backend]
        smallest = large.smallest.get(device_type, 0)
        if smallest <= 1:
            return large.function
        small = self.small or self.implementations["reference"].function
        return cast("Function", BySize(large.function, small, smallest))


@dataclass(frozen=True)
class BySize:
    """Dispatch by size: a kernel for large tensors, torch for small ones.

    Attributes:
        large: the kernel.
        small: function for a first tensor of fewer than ``smallest`` elements.
        smallest: see Implementation.
    """

    large: Callable[..., Any]
    small: Callable[..., Any]
    smallest: int

    def __call__(self, *arguments: Any) -> Any:
        """Compute the operation."""
        return (self.small if arguments[0].numel() < self.smallest else self.large)(*arguments)
