"""Argument checks of the bindings: out-of-bounds accesses, and tensors of several devices."""

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.ops.op_checks import drawn
from tests.waiting import HANG_S
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildSettings


def rows(*shape: int) -> torch.Tensor:
    return drawn(shape, torch.float32)


NORM = "is not one number for each of the 4 rows"
REFUSED = {
    "rms_norm_backward's scale is short": (
        lambda ops: ops.rms_norm_backward(rows(4, 8), None, rows(4, 8), rows(8), rows(3)),
        f"rms_norm_backward: scale {NORM}",
    ),
    "rms_norm_backward's scale has gaps": (
        lambda ops: ops.rms_norm_backward(rows(4, 8), None, rows(4, 8), rows(8), rows(8)[::2]),
        f"rms_norm_backward: scale {NORM}",
    ),
    "rms_norm_backward's scale is of the rows' dtype": (
        lambda ops: ops.rms_norm_backward(*_bfloat16(rows(4, 8)), None, *_bfloat16(rows(4, 8), rows(8), rows(4))),
        "rms_norm_backward: scale has another dtype",
    ),
    "layer_norm_backward's mean is short": (
        lambda ops: ops.layer_norm_backward(rows(4, 8), rows(4, 8), rows(8), rows(1), rows(4)),
        f"layer_norm_backward: mean {NORM}",
    ),
    "layer_norm_backward's scale is of another dtype": (
        lambda ops: ops.layer_norm_backward(rows(4, 8), rows(4, 8), rows(8), rows(4), rows(4).double()),
        "layer_norm_backward: scale has another dtype",
    ),
    "moe_combine_backward's tokens have no choices": (
        lambda ops: ops.moe_combine_backward(rows(2, 8), rows(3, 8), torch.zeros(3, dtype=torch.int64), rows(2, 0)),
        "moe_combine_backward: there are 3 rows, but tokens have no choices",
    ),
    "moe_combine_backward has rows without tokens": (
        lambda ops: ops.moe_combine_backward(rows(0, 8), rows(3, 8), torch.zeros(3, dtype=torch.int64), rows(0, 2)),
        "moe_combine_backward: there are 3 rows, but tokens have no choices",
    ),
    "moe_combine's place is beyond the rows": (
        lambda ops: ops.moe_combine(rows(3, 8), torch.tensor([[0, 3], [4, 1]]), None),
        "moe_combine: places has 4, not a number from 0 to 3",
    ),
    "moe_combine's place is before the rows": (
        lambda ops: ops.moe_combine(rows(3, 8), torch.tensor([[0, -1]]), None),
        "moe_combine: places has -1, not a number from 0 to 3",
    ),
    "moe_combine_backward's choice is beyond the tokens'": (
        lambda ops: ops.moe_combine_backward(rows(2, 8), rows(3, 8), torch.tensor([0, 1, 4]), rows(2, 2)),
        "moe_combine_backward: choices has 4, not a number from 0 to 3",
    ),
}


def _bfloat16(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.bfloat16() for tensor in tensors]


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("kernel_library")
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(torch.ops.llmctl)


@pytest.mark.usefixtures("kernel_library")
def test_without_rows_there_need_be_no_choices() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    grads = torch.ops.llmctl.moe_combine_backward(rows(2, 8), rows(0, 8), nothing, rows(2, 0))
    assert [tuple(grad.shape) for grad in grads] == [(0, 8), (2, 0)]


@pytest.mark.usefixtures("kernel_library")
def test_copies_share_memory_that_is_only_read() -> None:
    values = rows(1000)
    copy: Any = torch._lazy_clone(values)  # type: ignore[attr-defined]
    torch.ops.llmctl.sum_of_squares([copy])
    assert torch._C._is_cow_tensor(copy)  # type: ignore[attr-defined]
    assert torch.equal(copy, values)


def test_gpus_are_distinguished(tmp_path: Path) -> None:
    target, folder = tmp_path / "device_checks.so", Path(torch.__file__).parent
    of_torch = ["-isystem", str(folder / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    source = Path(__file__).with_name("device_checks.cpp")
    # Optimised, to remove uncalled functions, which would need symbols of torch's libraries.
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,lazy"]
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers).command
    subprocess.run([*compiler, *flags, *of_torch, str(source), "-o", str(target)], check=True, timeout=HANG_S)
    are_on_one_device = ctypes.CDLL(str(target)).are_on_one_device
    cpu, cuda = 0, 1
    assert are_on_one_device(cuda, 0, cuda, 0)
    assert are_on_one_device(cpu, -1, cpu, 0)
    assert not are_on_one_device(cuda, 0, cuda, 1)
    assert not are_on_one_device(cpu, 0, cuda, 0)
