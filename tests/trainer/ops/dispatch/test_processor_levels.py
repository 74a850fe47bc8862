"""csrc/common/cpu/level.cpp on processors that lack some of x86-64-v3: compilers use all of it."""

import ctypes
import os
import platform
import subprocess
from pathlib import Path

import pytest

from tests.waiting import HANG_S
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.build.sources import source_folder

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86-64's")

_HEADER = """
static unsigned missing_leaf, missing_bit;
extern "C" void hide(unsigned leaf, unsigned bit) { missing_leaf = leaf; missing_bit = bit; }
static int __get_cpuid(unsigned leaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx) {
  *eax = *ebx = *edx = 0;
  *ecx = leaf == missing_leaf ? ~(1u << missing_bit) : ~0u;
  return 1;
}
static int __get_cpuid_count(unsigned leaf, unsigned, unsigned *eax, unsigned *, unsigned *, unsigned *) {
  *eax = leaf == missing_leaf ? ~(1u << missing_bit) : ~0u;
  return 1;
}
"""


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The choice of a level with a fake CPUID that can hide a bit."""
    folder = tmp_path_factory.mktemp("level")
    (folder / "cpuid.h").write_text(_HEADER)
    target = folder / "level.so"
    source = source_folder() / "common" / "cpu" / "level.cpp"
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers).command
    command = [*compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{folder}"]
    subprocess.run([*command, str(source), "-o", str(target)], check=True, timeout=HANG_S)
    return ctypes.CDLL(str(target))


BEST = 99


@pytest.mark.parametrize(
    ("leaf", "bit", "level", "named"),
    [(1, 22, 0, "avx2"), (1, 29, 0, "avx2"), (0x80000001, 5, 0, "avx2"), (7, 5, 2, "avx512vl")],
    ids=["movbe", "f16c", "lzcnt", "avx512_bf16"],
)
def test_without_an_instruction_of_a_level_a_lower_one_is_used(
    processor: ctypes.CDLL, leaf: int, bit: int, level: int, named: str
) -> None:
    if named not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip(f"this processor lacks {named}")
    processor.hide(0, 0)
    assert processor.llmctl_cpu_set_level(BEST) > level
    processor.hide(ctypes.c_uint(leaf), bit)
    assert processor.llmctl_cpu_set_level(BEST) == processor.llmctl_cpu_processor_level() == level
