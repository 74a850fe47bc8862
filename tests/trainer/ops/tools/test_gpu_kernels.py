"""Kernels on a real GPU: the operations' tests, reproducible bits, and CUDA graphs.

python -m pytest -m gpu tests/trainer/ops/tools/test_gpu_kernels.py
python -m tests.trainer.ops.cuda.cuda_sanitizer
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.ops.cuda.test_cuda_ops import TESTED
from tests.trainer.ops.op_checks import mapped, tensors_of
from tests.waiting import HANG_S
from trainer.ops.build.build_settings import BuildSettings, LineReport
from trainer.ops.build.device_image import IMAGE_COMPILERS, load_device_image
from trainer.ops.dispatch.library import Library
from trainer.ops.dispatch.registry import OPERATIONS as ROWS
from trainer.ops.operation import Operation

pytestmark = pytest.mark.gpu

_HERE = Path(__file__).parent
_PLUGIN = (sys.executable, "-m", "pytest", "-p", "tests.trainer.ops.tools.gpu_plugin", "--no-header")
_CAPTURED = [
    (operation, dtype)
    for operation in ROWS
    if "native" in operation.implementations
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if "cuda" in operation.implementations["native"].devices and dtype in operation.implementations["native"].dtypes
]


def check_passes(*words: str) -> None:
    """Check that pytest under the plugin passes, and runs at least one test."""
    done = subprocess.run(
        [*_PLUGIN, *words], capture_output=True, text=True, timeout=HANG_S, check=False, cwd=_HERE.parents[3]
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 20


@pytest.mark.parametrize("by", IMAGE_COMPILERS)
@pytest.mark.parametrize("operation", TESTED)
def test_ops_pass_their_tests(operation: str, by: str) -> None:
    check_passes("--image-by", by, str(_HERE.parent / f"test_{operation}.py"))


@pytest.fixture(scope="module")
def device(kernel_library: Library) -> torch.device:
    here = torch.device("cuda", torch.cuda.current_device())
    load_device_image(kernel_library.path, BuildSettings.from_variables(os.environ), here, "nvcc", LineReport())
    return here


def both_passes(operation: Operation[Any], arguments: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients; without gradients, results and changed arguments.

    ``gradients`` are the gradients of the results. The first call adds missing ones.
    """
    # Only non-leaf tensors may be changed in place.
    passed = mapped(torch.Tensor.clone, arguments)
    results = list(tensors_of(operation.implementations["native"].function(*passed)))
    # Backward may overwrite the gradients.
    found = [result.detach().clone() for result in results]
    differentiable = [result for result in results if result.requires_grad]
    if not differentiable:
        return [*found, *tensors_of(passed)]
    gradients += [torch.randn_like(result) for result in differentiable[len(gradients) :]]
    leaves = [value for value in tensors_of(arguments) if value.requires_grad]
    return [*found, *torch.autograd.grad(differentiable, leaves, gradients)]


@pytest.mark.parametrize("example", [0, -1], ids=["tiny", "large"])
@pytest.mark.parametrize(("operation", "dtype"), _CAPTURED, ids=lambda value: getattr(value, "name", str(value)))
def test_a_graph_replays_what_a_launch_does(
    operation: Operation[Any], dtype: torch.dtype, example: int, device: torch.device
) -> None:
    captured, second = (
        operation.examples[example](device, dtype, torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    gradients: list[torch.Tensor] = []
    right = both_passes(operation, second, gradients)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        both_passes(operation, captured, gradients)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_passes(operation, captured, gradients)
    with torch.no_grad():
        for memory, values in zip(tensors_of(captured), tensors_of(second), strict=True):
            memory.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, right, rtol=0.0, atol=0.0, equal_nan=True)


def test_another_stream_and_another_thread_are_used(device: torch.device) -> None:
    """A launch uses torch's current stream, also in a new thread."""
    from concurrent.futures import ThreadPoolExecutor

    hidden, weight = torch.randn(64, 256, device=device), torch.ones(256, device=device)
    expected = torch.ops.llmctl.rms_norm(hidden, weight, 1e-5)[0]

    def elsewhere() -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            normed: torch.Tensor = torch.ops.llmctl.rms_norm(hidden, weight, 1e-5)[0]
            torch.cuda.current_stream().synchronize()
            return normed

    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(elsewhere).result(), expected)
