"""Compilers without the names of the instruction-set levels, or without some instructions."""

import ctypes
import os
import platform
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from trainer.ops.build import build
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.build.sources import source_folder

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86-64's")


def compiler_here():
    return find_compiler(BuildSettings.from_variables(os.environ).compilers).command


@pytest.fixture
def compiler(tmp_path):
    """Make a compiler that rejects some flags of the installed compiler."""

    def make(refused):
        path = tmp_path / "old-c++"
        path.write_text(
            f'#!/bin/bash\ncase " $* " in *{refused}*) echo "error: bad value" >&2; exit 1;; esac\n'
            f'{shlex.join(compiler_here())} "$@"\n'
        )
        path.chmod(0o755)
        return find_compiler([(str(path),)])

    return make


def levels(compiler):
    return build._levels(compiler, Path(compiler.command[0]).parent, time.monotonic() + 60.0)


def test_levels_by_name_or_by_their_instructions(compiler):
    assert levels(compiler("nothing"))["v4"] == ("-march=x86-64-v4", "-mprefer-vector-width=512")
    nameless = levels(compiler("-march=x86-64-v"))
    assert set(nameless) == {"v3", "v4"}
    assert "-mavx2" in nameless["v3"] and "-mavx512f" in nameless["v4"]
    assert set(levels(compiler("avx512"))) == {"v3", "v4"}
    assert set(levels(compiler("x86-64-v4* | *avx512"))) == {"v3"}


def test_without_a_level_the_next_lower_one_is_used(tmp_path):
    flags = ["-std=c++17", "-fPIC", "-O1", "-fopenmp-simd", "-c"]
    level, kernels = "common/cpu/level.cpp", "rms_norm/cpu.cpp"
    for name, file, more in (
        ("level", level, ["-DLLMCTL_WITHOUT_V4"]),
        ("portable", kernels, ["-DLLMCTL_WITHOUT_V4"]),
        ("v3", kernels, ["-march=x86-64-v3", "-DLLMCTL_ISA=v3"]),
    ):
        words = [*flags, *more, str(source_folder() / file), "-o", str(tmp_path / f"{name}.o")]
        subprocess.run([*compiler_here(), *words], check=True)
    library = tmp_path / "library.so"
    objects = sorted(map(str, tmp_path.glob("*.o")))
    subprocess.run([*compiler_here(), "-shared", "-Wl,-z,defs", "-o", str(library), *objects], check=True)
    loaded = ctypes.CDLL(str(library))
    best = loaded.llmctl_cpu_level()
    assert best in (0, 1)
    assert loaded.llmctl_cpu_set_level(2) == best
