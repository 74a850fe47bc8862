"""Kernel registry: all operations, and the function that a run uses for each."""

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
"""All operations, in the order of reports."""


class Kernels:
    """One function per operation: ``kernels[RMS_NORM](hidden, weight, epsilon)``.

    Users keep the kernels, not a function of them: ``switch_to`` replaces the functions of a run that trains.
    """

    def __init__(self, in_cpu_memory: Kernels | None = None, /, **functions: Callable[..., Any]) -> None:
        """Take functions by the names of their operations. Other operations use their default.

        Args:
            in_cpu_memory: kernels for tensors in CPU memory of a run on a GPU; None: these kernels.
            functions: name of the operation -> function.

        Raises:
            ValueError: there is no operation of a name.
        """
        unknown = functions.keys() - ROWS.keys()
        if unknown:
            raise ValueError(f"{min(unknown)!r} is not an operation; valid are {', '.join(ROWS)}")
        self._functions = functions
        self._in_cpu_memory = in_cpu_memory
        self._flash_attn: FlashAttnPackage | str | None = None

    @classmethod
    def of(cls, chosen: Mapping[str, Backend], device: torch.device, in_cpu_memory: Kernels | None = None) -> Kernels:
        """Kernels on ``device`` for ``chosen``, operation -> backend.

        Other operations use their default.
        """
        known = {operation.name: operation for operation in OPERATIONS}
        functions = {name: known[name].function(backend, device.type) for name, backend in chosen.items()}
        return cls(in_cpu_memory, **functions)

    def __getitem__(self, operation: Operation[Function]) -> Function:
        default = operation.implementations[operation.default].function
        return cast("Function", self._functions.get(operation.name, default))

    def switch_to(self, other: Kernels) -> None:
        """Take the functions of ``other`` from now on, for all users. Not between a forward and its backward pass."""
        assert self._in_cpu_memory is other._in_cpu_memory is None, "only a run on CPUs switches"
        self._functions = other._functions

    def with_flash_attn(self, found: FlashAttnPackage | str) -> Kernels:
        """Copy with the flash-attn package to use, or the reason for having none."""
        other = copy.copy(self)
        other._flash_attn = found
        return other

    @property
    def flash_attn(self) -> FlashAttnPackage | str | None:
        """See ``with_flash_attn``; None: not decided, callers look for flash-attn themselves."""
        return self._flash_attn

    @property
    def in_cpu_memory(self) -> Kernels:
        """Kernels for tensors in CPU memory, such as the state of an offloaded optimizer."""
        return self if self._in_cpu_memory is None else self._in_cpu_memory
