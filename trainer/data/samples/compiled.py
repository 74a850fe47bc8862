"""Functions of csrc/data in the library of kernels, through ctypes. Torch-free.

Nothing is compiled or looked for here: whoever has the library names it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Function = Callable[..., Any]
Signature = tuple[Any, Sequence[Any]]
"""The types of the result and of the arguments, those of ctypes."""


def functions_of(library: Path | None, signatures: Mapping[str, Signature]) -> tuple[Function, ...] | None:
    """Functions of ``library``; None: there is none, or it cannot be loaded or lacks one of them.

    Args:
        library: trainer.ops.dispatch.library.Library.path; only a process that has imported torch can load it.
        signatures: of each by its name, as in csrc/data.
    """
    if library is None:
        return None
    try:
        loaded = ctypes.CDLL(str(library))
        found = [loaded[name] for name in signatures]
    except (OSError, AttributeError):
        return None
    for function, (result, arguments) in zip(found, signatures.values(), strict=True):
        function.restype, function.argtypes = result, arguments
    return tuple(found)
