"""``python -m tests.trainer.ops.cuda.cuda_gates``: compile all kernels without spills or stack.

Compiles for all architectures: nvcc for those that it lists, NVRTC for the rest. Needs no GPU. An architecture takes 14
seconds of a core, so `make test` compiles only for the four in GENERATIONS. The cache of kernels keeps the compilers'
output, by sources and compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.trainer.ops.cuda.cuda_resources import resources_of
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_cache import BuildCache, read_sealed
from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.build.device_image import device_source
from trainer.ops.build.nvcc import NVCC_FLAGS, Nvcc, find_nvcc
from trainer.ops.build.nvrtc import NVRTC_FLAGS, Nvrtc, find_nvrtc

# Architectures of NVIDIA's GPUs for servers, workstations and boards since V100.
SUPPORTED = (70, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
# Volta, Turing, Hopper and workstation Blackwell. Ampere, Ada and the other Blackwells differ from these in
# threads and shared memory per multiprocessor, and in tensor cores, which no kernel uses. They have the same registers
# per thread and the instructions of these kernels. nvcc 13.0 gives no kernel more than 128 of 255 registers on any of
# the thirteen architectures.
GENERATIONS = (70, 75, 90, 120)
Compilers = list[Nvcc | Nvrtc]


def compilers_here(settings: BuildSettings) -> Compilers:
    """nvcc, if installed, and all installed NVRTC libraries."""
    packages = [Path(torch.__file__).parents[1]]
    found: Compilers = [*find_nvrtc(packages, settings.cuda_folders)]
    try:
        return [find_nvcc(packages, settings.cuda_folders), *found]
    except BuildError:
        return found


def compile_log(compilers: Compilers, architecture: int, settings: BuildSettings) -> tuple[str, str]:
    """The first compiler that supports an architecture, and its output.

    Raises:
        BuildError: no compiler supports the architecture, or the compiler rejects the kernels.
    """
    compiler = next((compiler for compiler in compilers if architecture in compiler.architectures()), None)
    if compiler is None:
        raise BuildError(f"nothing here compiles for sm_{architecture}")
    source = device_source()
    digest = hashlib.sha256(f"{compiler}{NVCC_FLAGS}{NVRTC_FLAGS}{source}".encode()).hexdigest()[:16]
    cache = BuildCache.below(settings.cache)

    def make(target: Path, deadline: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernels.cubin"
            text = Path(folder) / "kernels.cu"
            text.write_text(source, encoding="utf-8")
            if isinstance(compiler, Nvrtc):
                log = compiler.compile(text, cubin, architecture, deadline)
            else:
                host_compiler = find_compiler(settings.compilers).command
                log = compiler.compile(text, cubin, architecture, host_compiler, deadline)
        target.write_text(log)
        cache.remove_disused(f"gate-*/sm_{architecture}.log")

    path = cache.obtain(f"gate-{digest}/sm_{architecture}.log", make, print)
    return str(compiler), (read_sealed(path) or b"").decode(errors="replace")


def main() -> int:
    """Compile, and print all problems. Returns 1 if there are any."""
    parser = argparse.ArgumentParser(description="Compile all CUDA kernels for all architectures.")
    parser.add_argument("architectures", nargs="*", type=int, help="such as 90; default: all supported architectures")
    requested = parser.parse_args().architectures or list(SUPPORTED)
    settings = BuildSettings.from_variables(os.environ)
    compilers = compilers_here(settings)
    failed = False
    for architecture in requested:
        began = time.monotonic()
        try:
            compiler, log = compile_log(compilers, architecture, settings)
        except BuildError as error:
            print(error.reason)
            failed = True
            continue
        kernels = resources_of(log)
        problems = [kernel.problem for kernel in kernels if kernel.problem]
        failed = failed or bool(problems) or not kernels
        most = max(kernels, key=lambda kernel: kernel.registers, default=None)
        used = f"at most {most.registers} registers ({most.name})" if most else "no kernels"
        took = time.monotonic() - began
        print(f"sm_{architecture}: {len(kernels)} kernels by {compiler} in {took:.0f} s, {used}", flush=True)
        for problem in problems:
            print(f"  {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
