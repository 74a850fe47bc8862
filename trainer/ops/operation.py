"""What an operation is: its name, the ways to compute it, how each is tried before it is used, and how it is measured.

The backends, in the order in which ``auto`` takes them:
    native: csrc/, compiled for this machine's processor, on GPUs by nvcc.
    nvrtc: the same code for GPUs, compiled by the NVRTC that comes with torch: older GPUs, machines without nvcc.
    compile: what torch.compile makes of the reference; ``auto`` takes it on GPUs only, where reference is slowest.
    torch: what torch has for it, where that is not the reference.
    reference: operations of torch that come to mind, and the reference of the others.

A new operation is a file that ends with its Operation, and a row in trainer.planning.kernel_choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from trainer.config.kernel_names import BACKENDS, Backend

if TYPE_CHECKING:
    from trainer.ops.bench_case import Bench

__all__ = ["BACKENDS", "FLOATING", "Backend", "BySize", "Example", "Implementation", "Operation", "compiled"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Function = TypeVar("Function", bound=Callable[..., Any])
"""What an operation takes and gives."""
Example = Callable[[torch.device, torch.dtype, torch.Generator], tuple[Any, ...]]
"""Fresh arguments of a small call on a device, for activations of a dtype, drawn from a generator of the CPU."""


@dataclass(frozen=True)
class Implementation(Generic[Function]):
    """One way to compute an operation.

    Attributes:
        function: has the operation's arguments and results; differentiable where the operation is.
        devices: types of the devices that it runs on.
        dtypes: of the activations that it takes.
        smallest: type of device -> elements of the first tensor below which torch's operations are faster, and used.
    """

    function: Function
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATING
    smallest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation(Generic[Function]):
    """One operation and its implementations.

    Attributes:
        name: its name in the config, in reports and, where there is one op of that name, in torch.ops.llmctl.
        implementations: backend -> how; ``reference`` is always there. ``native`` and ``nvrtc`` share one, under
        ``native``. examples: what implementations are tried on: a call of odd sizes, which leave rests everywhere, and
        calls like
            those of training, which go the fast ways: whole vectors, rows of several warps, several rows in turn.
        consumed: positions of the arguments that hold nothing of meaning after the call.
        default: the backend that needs no choice.
        small: what is faster where an implementation's ``smallest`` is not reached; None: the reference one.
        register: tells torch about the ops of the library, once it is loaded; None: it has none. Operations may share
            one.
        bench: how it is measured; None: it is not.
    """

    name: str
    implementations: Mapping[Backend, Implementation[Function]]
    examples: Sequence[Example]
    consumed: tuple[int, ...] = ()
    default: Backend = "reference"
    small: Function | None = None
    register: Callable[[], None] | None = None
    bench: Bench | None = None

    def implementation(self, backend: Backend) -> Implementation[Function]:
        """The one on ``backend``, which there must be."""
        return self.implementations["native" if backend == "nvrtc" else backend]

    def is_small(self, backend: Backend, device_type: str, first: object) -> bool:
        """Whether a call with ``first`` as its first argument is left to torch's operations."""
        smallest = self.implementation(backend).smallest.get(device_type, 0)
        return isinstance(first, torch.Tensor) and first.numel() < smallest

    def function(self, backend: Backend, device_type: str) -> Function:
        """What a run on ``backend`` calls: what is faster at each size."""
        large = self.implementation(backend)
        smallest = large.smallest.get(device_type, 0)
        if smallest <= 1:
            return large.function
        small = self.small or self.implementations["reference"].function
        return cast("Function", BySize(large.function, small, smallest))


@dataclass(frozen=True)
class BySize:
    """What a run calls of an operation that has more than one fastest implementation.

    Attributes:
        large: a kernel.
        small: what is faster on a first tensor of fewer than ``smallest`` elements.
        smallest: see Implementation.
    """

    large: Callable[..., Any]
    small: Callable[..., Any]
    smallest: int

    def __call__(self, *arguments: Any) -> Any:
        """The operation."""
        return (self.small if arguments[0].numel() < self.smallest else self.large)(*arguments)


@dataclass(frozen=True)
class _Compiled:
    """A function through torch.compile, which compiles at the first call of each size."""

    reference: Callable[..., Any]

    @cached_property
    def _function(self) -> Callable[..., Any]:
        # Made at the first call: the import of torch's compiler takes seconds. Code for any size is slower.
        return torch.compile(self.reference, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        """The operation."""
        return self._function(*arguments)


def compiled(reference: Function) -> Implementation[Function]:
    """The implementation on ``compile``: for references whose sizes and constants are the same in every step."""
    return Implementation(cast("Function", _Compiled(reference)))
