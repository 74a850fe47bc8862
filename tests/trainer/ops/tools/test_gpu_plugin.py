"""The GPU plugin, tested without a GPU: tensors and calls of the operations' tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.ops import test_rms_norm
from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.op_checks import run
from tests.waiting import HANG_S
from trainer.ops.rms_norm import RMS_NORM

pytestmark = pytest.mark.usefixtures("kernel_library")

_HERE = Path(__file__).parent
_PLUGINS = ("-p", "tests.trainer.ops.cuda.cuda_emulation.ops_plugin", "-p", "tests.trainer.ops.tools.gpu_plugin")


def test_arguments_that_are_made_elsewhere_are_refused() -> None:
    given = test_rms_norm.arguments(RMS_NORM, (5, 123), torch.bfloat16)
    with torch.device("meta"), pytest.raises(AssertionError, match="an argument lies on cpu"):
        run(RMS_NORM.implementations["native"].function, given)


def test_the_emulated_gpu_passes_as_a_gpu_would(emulated_cuda: EmulatedCuda) -> None:
    """Runs all GPU tests of two files: alignment, in-place calls, reproducible bits."""
    del emulated_cuda  # Built once for all tests.
    files = [str(_HERE.parent / f"test_{name}.py") for name in ("moe_permute", "tensor_lists")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *_PLUGINS, "--kernels-on", "cpu", "--no-header", *files],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        cwd=_HERE.parents[3],
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed, left_out = (int(re.findall(rf"(\d+) {word}", done.stdout)[-1]) for word in ("passed", "deselected"))
    assert passed > 50
    assert left_out > 50
