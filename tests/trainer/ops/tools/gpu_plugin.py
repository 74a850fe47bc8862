"""A plugin of pytest under which the operations' own tests run the library's kernels on a CUDA device.

    python -m pytest -p tests.trainer.ops.tools.gpu_plugin tests/trainer/ops/test_rms_norm.py

Torch's default device becomes the GPU, so that all that a test makes lies there, and what it calls runs there: kernels,
references, and what looks at memory, alike. Every call that op_checks.run makes is made twice, and has the same bits
both times. ``--image-by nvrtc`` takes the image by NVRTC. ``--kernels-on cpu``, behind cuda_emulation.ops_plugin, is
for the emulated GPU, whose memory is the CPU's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trainer.ops import op_checks
from trainer.ops.build.build_settings import BuildSettings, LineReport
from trainer.ops.build.device_image import load_device_image
from trainer.ops.dispatch.library import load_on_demand


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which device, and who compiles for it."""
    parser.addoption("--kernels-on", choices=("cuda", "cpu"), default="cuda", help="device where the tests run")
    parser.addoption("--image-by", choices=("native", "nvrtc"), default="native", help="who compiles the device's code")


def pytest_configure(config: pytest.Config) -> None:
    """Load the library and the image of its kernels; from here on tensors are made on the device."""
    if config.getoption("--kernels-on") == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        settings = BuildSettings.from_variables(os.environ)
        library = load_on_demand(settings, LineReport())
        print(load_device_image(library.path, settings, device, config.getoption("--image-by"), LineReport()))
        torch.set_default_device(device)
    op_checks.run = twice(op_checks.run)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about the CPU, and the repetitions of what differs by the CPU's instruction set alone."""
    left = [item for item in items if is_of_the_cpu(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def is_of_the_cpu(item: pytest.Item) -> bool:
    """Whether a test shows nothing on a GPU."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return item.get_closest_marker("cpu_only") is not None or values.get("level", "portable") != "portable"


def twice(run: Callable[..., Any]) -> Callable[..., Any]:
    """op_checks.run, made twice, with the same bits both times."""

    def run_twice(function: Callable[..., Any], arguments: Any, **more: Any) -> Any:
        first = run(function, arguments, **more)
        again = run(function, arguments, **{**more, "gradients": more.get("gradients") or first[1]})
        torch.testing.assert_close(again[0], first[0], rtol=0.0, atol=0.0, equal_nan=True)
        return first

    return run_twice
