"""Pytest plugin that runs the operations' tests on a CUDA device.

    python -m pytest -p tests.trainer.ops.tools.gpu_plugin tests/trainer/ops/test_rms_norm.py

torch's default device becomes the GPU: tests make their tensors there, and kernels, references and checks run there.
The plugin makes every call of op_checks.run twice, and requires identical bits. ``--image-by NVRTC`` uses NVRTC's
image. ``--kernels-on cpu``, together with cuda_emulation.ops_plugin, is for the emulated GPU, which uses the CPU's
memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trainer.ops import op_checks
from trainer.ops.build.build_settings import BuildSettings, LineReport
from trainer.ops.build.device_image import IMAGE_COMPILERS, load_device_image
from trainer.ops.dispatch.library import load_on_demand


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the device and the compiler of the image."""
    parser.addoption("--kernels-on", choices=("cuda", "cpu"), default="cuda", help="device of the tests")
    parser.addoption("--image-by", choices=IMAGE_COMPILERS, default="nvcc", help="compiler of the image")


def pytest_configure(config: pytest.Config) -> None:
    """Load the library and the image, and make the device torch's default."""
    if config.getoption("--kernels-on") == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        settings = BuildSettings.from_variables(os.environ)
        library = load_on_demand(settings, LineReport())
        print(load_device_image(library.path, settings, device, config.getoption("--image-by"), LineReport()))
        torch.set_default_device(device)
    op_checks.run = twice(op_checks.run)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the CPU, and repetitions over the CPU's instruction sets."""
    left = [item for item in items if is_of_the_cpu(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def is_of_the_cpu(item: pytest.Item) -> bool:
    """True if a test has no meaning on a GPU."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return item.get_closest_marker("cpu_only") is not None or values.get("level", "portable") != "portable"


def twice(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap op_checks.run to run twice and to compare the bits."""

    def run_twice(function: Callable[..., Any], arguments: Any, **more: Any) -> Any:
        first = run(function, arguments, **more)
        again = run(function, arguments, **{**more, "gradients": more.get("gradients") or first[1]})
        torch.testing.assert_close(again[0], first[0], rtol=0.0, atol=0.0, equal_nan=True)
        return first

    return run_twice
