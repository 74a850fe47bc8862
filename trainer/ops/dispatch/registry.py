"""All operations, and Kernels: the implementation of each that one rank's layers and optimizer run on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from trainer.ops.operation import Backend, Function, Operation
from trainer.planning.kernel_choice import ROWS

if TYPE_CHECKING:
    from trainer.ops.attention.flash_attn import FlashAttnPackage

OPERATIONS: tuple[Operation[Any], ...] = tuple(
    getattr(import_module(f"trainer.ops.{row.module}"), name.upper()) for name, row in ROWS.items()
)
"""Every operation, in the order of reports."""


def register_operations() -> None:
    """Tell torch about the ops of the library, which has been loaded."""
    # Some share what registers them.
    for register in {operation.register: None for operation in OPERATIONS}:
        if register is not None:
            register()


class Kernels:
    """One function per operation: ``kernels[RMS_NORM](hidden, weight, epsilon)``. Never changed once it is made."""

    def __init__(self, in_cpu_memory: Kernels | None = None, /, **functions: Callable[..., Any]) -> None:
        """Take functions by the names of their operations; what is left out runs on its operation's default.

        Args:
            in_cpu_memory: those for tensors that are kept in CPU memory beside a GPU; None: the same.
            functions: by name of the operation.

        Raises:
            ValueError: there is no operation of that name.
        """
        unknown = functions.keys() - ROWS.keys()
        if unknown:
            raise ValueError(f"{min(unknown)!r} is no operation; there are {', '.join(ROWS)}")
        self._functions = functions
        self._in_cpu_memory = in_cpu_memory
        self._flash_attn: FlashAttnPackage | str | None = None

    @classmethod
    def of(cls, chosen: Mapping[str, Backend], device: torch.device, in_cpu_memory: Kernels | None = None) -> Kernels:
        """Those of the backends ``chosen`` by operation on ``device``; what is left out runs on its default."""
        known = {operation.name: operation for operation in OPERATIONS}
        functions = {name: known[name].function(backend, device.type) for name, backend in chosen.items()}
        return cls(in_cpu_memory, **functions)

    def __getitem__(self, operation: Operation[Function]) -> Function:
        default = operation.implementations[operation.default].function
        return cast("Function", self._functions.get(operation.name, default))

    def with_flash_attn(self, found: FlashAttnPackage | str) -> Kernels:
        """The same where it is settled which flash-attn attention may run on: this one, or for that reason none."""
        other = copy.copy(self)
        other._flash_attn = found
        return other

    @property
    def flash_attn(self) -> FlashAttnPackage | str | None:
        """See ``with_flash_attn``; None: nothing is settled, and whoever wants it looks for it."""
        return self._flash_attn

    @property
    def in_cpu_memory(self) -> Kernels:
        """Those for tensors that are kept in CPU memory, such as the state of an offloaded optimizer."""
        return self if self._in_cpu_memory is None else self._in_cpu_memory
