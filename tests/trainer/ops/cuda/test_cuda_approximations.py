"""The errors that common/cuda/approximations.h states for 16-bit elements hold, and no result is NaN."""

import ctypes
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.waiting import HANG_S
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildSettings

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("approximations") / "approximations.so"
    source = Path(__file__).with_name("approximations.cpp")
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers)
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wno-unused-function")
    subprocess.run([*compiler.command, *flags, str(source), "-o", str(target)], check=True, timeout=HANG_S)
    return ctypes.CDLL(str(target))


def both(library: ctypes.CDLL, name: str, x: torch.Tensor) -> Pair:
    results = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, *results))
    getattr(library, name)(*pointers, ctypes.c_int64(x.numel()))
    return results[0].double(), results[1].double()


def largest_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float(((found - right) / right).abs().max())


def test_the_logistic_function(library: ctypes.CDLL) -> None:
    x = torch.linspace(-80.0, 80.0, 100_001)
    value, rest = both(library, "logistic", x)
    right = torch.sigmoid(x.double())
    # Within the range of 16-bit results. Exponents are rounded, and their errors are relative.
    assert ((value - right) / right).abs().sub(x.abs() * 2.0**-23).max() < 2.0**-21
    assert largest_error(rest[x <= 15], torch.sigmoid(-x.double())[x <= 15]) < 2.0**-18


def test_the_normal_distribution(library: ctypes.CDLL) -> None:
    x = torch.linspace(-12.0, 12.0, 100_001)
    distribution, density = both(library, "normal", x)
    assert largest_error(distribution, 0.5 * torch.special.erfc(x.double() * -(0.5**0.5))) < 4e-5
    assert largest_error(density, (-0.5 * x.double() ** 2).exp() / math.sqrt(2 * math.pi)) < 4e-5


def test_powers(library: ctypes.CDLL) -> None:
    x = torch.linspace(-87.0, 0.0, 100_001)
    errors = (both(library, "power", x)[0] / x.double().exp() - 1).abs()
    assert (errors / (1 + x.double().abs())).max() < 2.0**-22
    far = torch.tensor([-88.0, -1e30, -math.inf])
    assert not both(library, "power", far)[0].any()


@pytest.mark.parametrize("name", ["logistic", "normal"])
def test_far_out_they_are_zero_or_one(library: ctypes.CDLL, name: str) -> None:
    largest = torch.finfo(torch.bfloat16).max
    first, second = both(library, name, torch.tensor([-math.inf, -largest, -200.0, 200.0, largest, math.inf, math.nan]))
    assert first[:6].tolist() == [0, 0, 0, 1, 1, 1]
    assert second[3:6].tolist() == [0, 0, 0]
    assert second[:6].isfinite().all()
    assert first[6].isnan()
