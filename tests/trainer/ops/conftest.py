"""The library of kernels, built once into the cache of whoever runs the tests, and what its tests are repeated over."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda, all_kernels, build_emulation
from tests.trainer.ops.op_checks import DTYPES, LAYOUTS, LEVELS, at_level
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport
from trainer.ops.dispatch.library import Library, load_on_demand


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark of these tests known."""
    config.addinivalue_line("markers", "cpu_only: not run again on a GPU: about the CPU, or about neither")


@pytest.fixture(scope="session")
def kernel_library() -> Library:
    """The library, in this process. tests.conftest keeps the cache where it is between sessions."""
    try:
        return load_on_demand(BuildSettings.from_variables(os.environ), LineReport())
    except BuildError as error:
        pytest.fail(f"{error.reason}\n{error.log}")


@pytest.fixture(scope="session")
def emulated_cuda() -> EmulatedCuda:
    """All CUDA kernels and their launchers on a fake GPU: functions llmctl_cuda_* that take CPU tensors."""
    return EmulatedCuda(build_emulation(BuildSettings.from_variables(os.environ), "kernels", all_kernels()))


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, kernel_library: Library) -> Iterator[str]:
    """The instruction set that CPU kernels run on during the test."""
    del kernel_library
    with at_level(request.param):
        yield request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype of activations."""
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Each way in which tensors lie in memory."""
    return str(request.param)
