"""Pytest plugin that runs the operations' tests with CUDA ops on the emulated GPU.

    python -m pytest -p tests.trainer.ops.cuda.cuda_emulation.ops_plugin tests/trainer/ops/test_rms_norm.py

The plugin loads csrc's CUDA ops as torch.ops.llmctl before any test loads the library, which is then not loaded again.
The kernels for CPUs are stubs with one instruction-set level. Every test runs threads and blocks in another order than
the test before.

The plugin deselects tests without a GPU part, which the CPU run covers: autograd formulas (finite differences),
rejected arguments, and tests marked ``cpu_only``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.trainer.ops.cuda.cuda_emulation.emulation import (
    ORDERS,
    EmulatedCuda,
    all_kernels,
    build_emulated_ops,
    build_emulation,
)
from tests.trainer.ops.tools.gpu_plugin import is_of_the_cpu
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.library import load_library

# Parts of test names.
_WITHOUT_A_GPU = (
    *("finite_differences", "test_gradients", "refused"),
    *("real_ranks", "reference_torch_is_right", "errors_of_torch"),
)


class EmulatedOps:
    """Run every test on the emulated GPU."""

    def __init__(self) -> None:
        settings = BuildSettings.from_variables(os.environ)
        self._cuda = EmulatedCuda(build_emulation(settings, "kernels", all_kernels()))
        self._orders = cycle(ORDERS)
        load_library(build_emulated_ops(settings))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect tests without a GPU part."""
        left = [item for item in items if is_of_the_cpu(item) or any(word in item.name for word in _WITHOUT_A_GPU)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Run a test in the next order."""
        with self._cuda.order(next(self._orders)):
            return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Load the emulated library instead of the native library."""
    config.pluginmanager.register(EmulatedOps())
