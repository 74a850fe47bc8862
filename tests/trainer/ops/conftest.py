"""Fixtures of kernel tests: the library (built once), levels, dtypes and layouts."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda, all_kernels, build_emulation
from tests.trainer.ops.op_checks import DTYPES, LAYOUTS, LEVELS, at_level
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport
from trainer.ops.dispatch.library import Library, load_on_demand


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of these tests."""
    config.addinivalue_line(
        "markers", "cpu_only: not repeated on a GPU, because the test is about the CPU or about no device"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test with the emulated GPU compiles it, beside a busy machine for more than 600 s."""
    for item in items:
        if "emulated_cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def kernel_library() -> Library:
    """The library, loaded in this process. tests.conftest keeps its cache between sessions."""
    try:
        return load_on_demand(BuildSettings.from_variables(os.environ), LineReport())
    except BuildError as error:
        pytest.fail(f"{error.reason}\n{error.log}")


@pytest.fixture(scope="session")
def emulated_cuda() -> EmulatedCuda:
    """All CUDA kernels and launchers on the emulated GPU: llmctl_cuda_* functions for CPU tensors."""
    return EmulatedCuda(build_emulation(BuildSettings.from_variables(os.environ), "kernels", all_kernels()))


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, kernel_library: Library) -> Iterator[str]:
    """Instruction set of the CPU kernels during the test."""
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
    """Each memory layout of tensors."""
    return str(request.param)
