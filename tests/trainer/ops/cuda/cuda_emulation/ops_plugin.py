"""A plugin of pytest under which the operations' own tests run their CUDA half, on CPU tensors and the emulated GPU.

    python -m pytest -p tests.trainer.ops.cuda.cuda_emulation.ops_plugin tests/trainer/ops/test_rms_norm.py

It loads what csrc registers for CUDA as torch.ops.llmctl before any test asks for the library; the loader takes
what is there. The instruction sets of the CPU's kernels are stubs with one level. From test to test, threads and blocks
take turns in another order.

Left out is what a GPU has no part in, and is shown by the same tests on the CPU: schemas, fakes and autograd formulas
(opcheck, finite differences, torch.compile), arguments that are refused, and what is marked ``cpu_only``.
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

# In the names of tests.
_WITHOUT_A_GPU = (
    *("finite_differences", "test_gradients", "registration", "torch_knows", "compiles", "refused"),
    *("real_ranks", "reference_torch_is_right", "errors_of_torch"),
)


class EmulatedOps:
    """Runs every test on the emulated GPU."""

    def __init__(self) -> None:
        settings = BuildSettings.from_variables(os.environ)
        self._cuda = EmulatedCuda(build_emulation(settings, "kernels", all_kernels()))
        self._orders = cycle(ORDERS)
        load_library(build_emulated_ops(settings))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what shows nothing here."""
        left = [item for item in items if is_of_the_cpu(item) or any(word in item.name for word in _WITHOUT_A_GPU)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Run a test in the next order."""
        with self._cuda.order(next(self._orders)):
            return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Load the emulated library in the place of the one for this machine."""
    config.pluginmanager.register(EmulatedOps())
