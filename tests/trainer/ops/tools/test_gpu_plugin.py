"""The GPU plugin, tested without a GPU: tensors and calls of the operations' tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.ops import (
    test_activation,
    test_adamw,
    test_bias_dropout_add,
    test_cross_entropy,
    test_layer_norm,
    test_moe_permute,
    test_rms_norm,
    test_rotary,
    test_softmax,
    test_tensor_lists,
)
from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.op_checks import run, tensors_of
from tests.waiting import HANG_S
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.operation import Operation
from trainer.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX, SCALED_MASKED_SOFTMAX

pytestmark = pytest.mark.usefixtures("kernel_library")

HALF = torch.bfloat16
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "rms_norm": lambda: test_rms_norm.arguments(RMS_NORM, (5, 123), HALF),
    "add_rms_norm": lambda: test_rms_norm.arguments(ADD_RMS_NORM, (5, 123), HALF),
    "layer_norm": lambda: test_layer_norm.arguments((5, 123), HALF),
    "activation": lambda: test_activation.arguments((5, 123), HALF),
    "rope": lambda: test_rotary.arguments(test_rotary.SHAPES[2], HALF),
    "adamw": lambda: test_adamw.arguments((5, 9), HALF, HALF),
    "l2_norm": lambda: (test_tensor_lists.tensors((17, 5), HALF),),
    "bias_dropout_add": lambda: test_bias_dropout_add.arguments((5, 123), HALF),
    "moe_permute": lambda: test_moe_permute.there((7, 3, 123), HALF),
    "moe_unpermute": lambda: test_moe_permute.back((7, 3, 123), HALF),
    "cross_entropy": lambda: test_cross_entropy.arguments((5, 123), 120, HALF, test_cross_entropy.EVERYTHING),
    "scaled_masked_softmax": lambda: test_softmax.arguments(SCALED_MASKED_SOFTMAX, (2, 3, 5, 7), HALF),
    "scaled_causal_softmax": lambda: test_softmax.arguments(SCALED_CAUSAL_SOFTMAX, (2, 3, 5, 7), HALF),
}
_HERE = Path(__file__).parent
_PLUGINS = ("-p", "tests.trainer.ops.cuda.cuda_emulation.ops_plugin", "-p", "tests.trainer.ops.tools.gpu_plugin")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_arguments_are_made_where_tests_run(operation: Operation[Any]) -> None:
    """torch's meta device replaces the GPU."""
    with torch.device("meta"):
        assert all(value.is_meta for value in tensors_of(ARGUMENTS[operation.name]()))


def test_arguments_that_are_made_elsewhere_are_refused() -> None:
    given = ARGUMENTS["rms_norm"]()
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
