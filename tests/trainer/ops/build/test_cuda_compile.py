"""CUDA kernels compile with nvcc and NVRTC, without spills or a stack.

Needs no GPU. `python -m tests.trainer.ops.cuda.cuda_gates` compiles for all architectures; this file compiles for the
first of each generation. Only NVRTC compiles for the oldest.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import all_kernels, entry_points
from tests.trainer.ops.cuda.cuda_gates import GENERATIONS, compile_log, compilers_here
from tests.trainer.ops.cuda.cuda_resources import resources_of
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.build.compile_jobs import jobs_that_fit
from trainer.ops.build.nvrtc import Nvrtc, find_nvrtc

SETTINGS = BuildSettings.from_variables(os.environ)


@pytest.fixture(scope="module")
def logs() -> Iterator[dict[int, Future[str]]]:
    """Architecture -> output of the compiler, with one compilation per core at a time."""
    compilers = compilers_here(SETTINGS)
    with ThreadPoolExecutor(jobs_that_fit()) as pool:
        yield {
            number: pool.submit(lambda at: compile_log(compilers, at, SETTINGS)[1], number) for number in GENERATIONS
        }


@pytest.mark.parametrize("architecture", GENERATIONS)
def test_every_kernel_compiles_without_spills(architecture: int, logs: dict[int, Future[str]]) -> None:
    found = resources_of(logs[architecture].result())
    names = {name for _, name, _ in entry_points(find_compiler(SETTINGS.compilers), all_kernels())}
    assert {kernel.name for kernel in found} == names, "the compiler did not tell of every kernel"
    assert [kernel.problem for kernel in found if kernel.problem] == []


def nvrtc(major: int) -> Nvrtc:
    """NVRTC of a major version of CUDA; version 12 is a development dependency."""
    for one in find_nvrtc([Path(torch.__file__).parents[1]], SETTINGS.cuda_folders):
        if one.version[0] == major:
            return one
    pytest.fail(f"there is no NVRTC {major} here: python -m pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'")


def test_errors_of_nvrtc_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "kernels.cu").write_text("\n__device__ int x = nothing;")
    with pytest.raises(
        BuildError, match=r"refused the kernels: kernels\.cu\(2\): error: identifier \"nothing\""
    ) as raised:
        nvrtc(12).compile(tmp_path / "kernels.cu", tmp_path / "a.cubin", 70, time.monotonic() + 60.0)
    assert "nothing" in raised.value.log


def spilled(text: str) -> Sequence[str | None]:
    return [kernel.problem for kernel in resources_of(text)]


def test_spills_are_detected() -> None:
    """The log is output of ptxas 13.0."""
    log = """ptxas info    : Compiling entry function 'sound_float32' for 'sm_90'
ptxas info    : Function properties for sound_float32
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function 'spills_float32' for 'sm_90'
ptxas info    : Function properties for spills_float32
    64 bytes stack frame, 60 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 64 bytes cumulative stack size
"""
    assert spilled(log) == [None, "spills_float32: 64 bytes of stack, 60 spilled, 72 reloaded"]
