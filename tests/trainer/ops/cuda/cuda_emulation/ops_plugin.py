"""Pytest plugin that runs the operations' tests with CUDA ops on the emulated GPU.

    python -m pytest -p tests.trainer.ops.cuda.cuda_emulation.ops_plugin tests/trainer/ops/test_rms_norm.py

The plugin loads csrc's CUDA ops as torch.ops.llmctl before any test loads the library, which is then not loaded again.
The kernels for CPUs are stubs with one instruction-set level. Every call of op_checks.run is repeated in another order
of threads and blocks, and must give the same bits: otherwise it has a race.

The plugin deselects tests without a GPU part, which the CPU run covers: autograd formulas (finite differences),
rejected arguments, and tests marked ``cpu_only``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from tests.trainer.ops import op_checks
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
        self._orders = cycle(ORDERS[1:])
        load_library(build_emulated_ops(settings))
        op_checks.run = self._in_another_order(op_checks.run)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect tests without a GPU part."""
        left = [item for item in items if is_of_the_cpu(item) or any(word in item.name for word in _WITHOUT_A_GPU)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]

    def _in_another_order(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def repeated(function: Callable[..., Any], arguments: Any, **more: Any) -> Any:
            first = run(function, arguments, **more)
            with self._cuda.order(next(self._orders)):
                again = run(function, arguments, **{**more, "gradients": more.get("gradients") or first[1]})
            torch.testing.assert_close(again[0], first[0], rtol=0.0, atol=0.0, equal_nan=True)
            return first

        return repeated


def pytest_configure(config: pytest.Config) -> None:
    """Load the emulated library instead of the native library."""
    config.pluginmanager.register(EmulatedOps())
