"""ctypes bindings of csrc/data in the native kernel library. Torch-free.

Nothing is compiled or searched here: the caller passes the library's path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Function = Callable[..., Any]
Signature = tuple[Any, Sequence[Any]]
"""ctypes of the result and of the arguments."""


def functions_of(library: Path | None, signatures: Mapping[str, Signature]) -> tuple[Function, ...] | None:
    """Functions of ``library``; None: no library, or loading failed, or a function is missing.

    Args:
        library: trainer.ops.dispatch.library.Library.path; only a process that has imported torch can load the library.
        signatures: signature of each function by name, as in csrc/data.
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
