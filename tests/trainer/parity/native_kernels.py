"""Models of the parity matrix on the native kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from tests.trainer.parity import layout_parity
from trainer.ops.dispatch.library import load_library
from trainer.ops.dispatch.registry import OPERATIONS, Kernels
from trainer.parallel_model import build_model


@contextmanager
def on_native_kernels(library: Path, level: str | None = None) -> Iterator[None]:
    """Run all operations on the native library, for tensors of any size.

    Args:
        library: file of the library.
        level: instruction set of the kernels for the rest of this process; None: the best available.
    """
    loaded = load_library(library)
    if level is not None:
        assert loaded.at_level(level).level == level, f"there are no kernels for {level} here"
    own = Kernels(**{operation.name: operation.implementations["native"].function for operation in OPERATIONS})
    with mock.patch.object(layout_parity, "build_model", partial(build_model, kernels=own)):
        yield
