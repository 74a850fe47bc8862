"""The Triton kernels without a GPU: right in Triton's interpreter, and compiled for GPUs without spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.kernels import test_activation, test_cross_entropy, test_rms_norm, test_rotary
from tests.trainer.kernels.cuda_resources import resources_of
from tests.trainer.kernels.op_checks import run
from trainer.kernels.activation import ACTIVATION
from trainer.kernels.cross_entropy import CROSS_ENTROPY
from trainer.kernels.operation import Operation
from trainer.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from trainer.kernels.rotary import ROPE

triton = pytest.importorskip("triton")

_HERE = Path(__file__).parent
_LIMIT_S = 280.0
_NORMS_AND_ACTIVATIONS = "norms or activations"
"""Words in the names of checks: of one process; another one makes all others."""


@pytest.mark.parametrize("checks", [_NORMS_AND_ACTIVATIONS, f"not ({_NORMS_AND_ACTIVATIONS})"])
def test_kernels_are_right_in_the_interpreter(checks: str) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    command = [sys.executable, "-m", "pytest", "--no-header", "-k", checks, str(_HERE / "triton_checks.py")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        cwd=_HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 50
    assert "skipped" not in done.stdout.splitlines()[-1]


class _NoDriver:
    """What Triton asks of a driver before it compiles; the device has the number of its architecture."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


Compile = Callable[[int, Operation, Any], list[Any]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compile]:
    """Compiles what an operation would launch on a GPU, forward and backward, for an architecture."""
    from triton.runtime import driver, jit

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels: list[Any] = []
    launch = jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        kernels.append(launch(self, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(jit.JITFunction, "run", compile_only)

    def kernels_of(architecture: int, operation: Operation, arguments: Any) -> list[Any]:
        monkeypatch.setattr(driver, "_active", _NoDriver(architecture))
        kernels.clear()
        run(operation.implementations["triton"].function, arguments)
        return list(kernels)

    yield kernels_of
    kernels.clear()


def ptxas_log(kernel: Any, folder: Path) -> str:
    """What the assembler says about registers and spills."""
    source = folder / "kernel.ptx"
    source.write_text(kernel.asm["ptx"], encoding="utf-8")
    target = re.search(r"^\.target (sm_\w+)", kernel.asm["ptx"], re.MULTILINE)
    assert target is not None
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch={target[1]}", str(source), "-o", str(folder / "kernel")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr


# What other architectures and dtypes are tried with.
TYPICAL = ("rms_norm", "swiglu", "cross_entropy", "rope")
CASES: dict[str, tuple[Operation, Any]] = {
    "rms_norm": (RMS_NORM, lambda dtype: test_rms_norm.arguments(RMS_NORM, (64, 4096), dtype)),
    "rms_norm of heads": (RMS_NORM, lambda dtype: test_rms_norm.arguments(RMS_NORM, (64, 3, 123), dtype)),
    "add_rms_norm": (ADD_RMS_NORM, lambda dtype: test_rms_norm.arguments(ADD_RMS_NORM, (64, 8192), dtype)),
    "swiglu": (
        ACTIVATION,
        lambda dtype: test_activation.arguments((64, 4096), dtype, bias=False, row_weight=False),
    ),
    "geglu": (ACTIVATION, lambda dtype: test_activation.arguments((64, 1023), dtype, "gelu")),
    "geglu by tanh": (ACTIVATION, lambda dtype: test_activation.arguments((64, 4096), dtype, "gelu_tanh")),
    "biased gelu": (
        ACTIVATION,
        lambda dtype: test_activation.arguments((64, 4096), dtype, "gelu_tanh", False, row_weight=False),
    ),
    "cross_entropy": (CROSS_ENTROPY, lambda dtype: test_cross_entropy.arguments((2, 32000), 32000, dtype)),
    "cross_entropy with everything": (
        CROSS_ENTROPY,
        lambda dtype: test_cross_entropy.arguments((2, 8192), 8190, dtype, test_cross_entropy.EVERYTHING),
    ),
    "rope": (ROPE, lambda dtype: test_rotary.arguments((4, 2, 4, 1, 128, 128, False), dtype)),
    "rope of shared groups": (
        ROPE,
        lambda dtype: test_rotary.arguments((4, 2, 2, 4, 123, 46, True), dtype, interleaved=True),
    ),
}


@pytest.mark.parametrize(
    ("case", "architecture", "dtype"),
    [
        *((case, 90, torch.bfloat16) for case in CASES),
        *((case, *other) for case in TYPICAL for other in ((90, torch.float32), (80, torch.float16))),
    ],
    ids=str,
)
def test_they_compile_without_spills(
    case: str, architecture: int, dtype: torch.dtype, compiled: Compile, tmp_path: Path
) -> None:
    operation, arguments = CASES[case]
    kernels = compiled(architecture, operation, arguments(dtype))
    assert len(kernels) == 2, "a kernel forward and one backward"
    for kernel in kernels:
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        (resources,) = resources_of(ptxas_log(kernel, tmp_path))
        assert resources.problem is None
