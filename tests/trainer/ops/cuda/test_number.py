"""Conversions of 16-bit numbers in csrc equal torch's for all bits, ties and levels."""

import ctypes
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from tests.waiting import HANG_S
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildSettings

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LEVELS = {"portable": [], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]}


@pytest.fixture(scope="module", params=LEVELS if platform.machine() == "x86_64" else ["portable"])
def conversions(request, tmp_path_factory):
    target = tmp_path_factory.mktemp("number") / "number_conversion.so"
    flags = [
        "-std=c++17",
        "-O3",
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-shared",
        "-fPIC",
        *LEVELS[request.param],
    ]
    source = Path(__file__).with_name("number_conversion.cpp")
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers)
    subprocess.run([*compiler.command, *flags, str(source), "-o", str(target)], check=True, timeout=HANG_S)
    if request.param == "v4" and "avx512vl" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor lacks x86-64-v4")
    return ctypes.CDLL(str(target))


def converted(library, name, values, dtype):
    result = torch.empty(values.shape, dtype=dtype)
    getattr(library, name)(
        ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(values.numel())
    )
    return result


def check_same_numbers(found, expected):
    """Check for the same bits, and NaN for NaN.

    torch may drop the payload of a NaN, depending on the processor.
    """
    assert torch.equal(found.isnan(), expected.isnan())
    bits = torch.int16 if found.element_size() == 2 else torch.int32
    numbers = ~expected.isnan()
    assert torch.equal(found.view(bits)[numbers], expected.view(bits)[numbers])


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_widens_as_torchs_does(conversions, name):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    check_same_numbers(converted(conversions, f"widen_{name}", every, torch.float32), every.float())


@pytest.mark.parametrize("name", DTYPES)
def test_every_number_and_every_tie_rounds_as_torchs_does(conversions, name):
    """Includes the floats on both sides of each tie, and subnormal and infinite results."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[name]).float()
    finite = every[every.isfinite()].double().unique()
    largest_step = finite[-1] - finite[-2]
    ends = torch.stack([finite[-1] + largest_step / 2, finite[-1] + largest_step])
    ties = torch.cat([(finite[1:] + finite[:-1]) / 2, ends, -ends]).float()
    above, below = (torch.nextafter(ties, torch.tensor(toward)) for toward in (float("inf"), float("-inf")))
    values = torch.cat([every, ties, above, below, -torch.zeros(1)])
    assert ties.unique().numel() > 60_000
    check_same_numbers(converted(conversions, f"round_{name}", values, DTYPES[name]), values.to(DTYPES[name]))


@pytest.mark.parametrize("name", DTYPES)
def test_any_float_rounds_as_torchs_does(conversions, name):
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1))
    values = bits.to(torch.int32).view(torch.float32)
    check_same_numbers(converted(conversions, f"round_{name}", values, DTYPES[name]), values.to(DTYPES[name]))


@pytest.mark.parametrize("name", DTYPES)
def test_subnormal_halves_survive_a_processor_that_flushes_floats(conversions, name):
    """float16 subnormals are normal floats. bfloat16 subnormals are subnormal floats, which arithmetic flushes."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    expected = every.float()
    normal = (expected == 0) | (expected.abs() >= torch.finfo(torch.float32).tiny) | expected.isnan()
    assert torch.set_flush_denormal(True)
    try:
        widened = converted(conversions, f"widen_{name}", every, torch.float32)
        rounded = converted(conversions, f"round_{name}", expected, DTYPES[name])
    finally:
        torch.set_flush_denormal(False)
    check_same_numbers(widened[normal], expected[normal])
    check_same_numbers(rounded[normal], every[normal])
