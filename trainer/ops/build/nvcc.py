"""NVIDIA's compiler nvcc: search, version query and compilation. Torch-free."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.ops.build.build_settings import BuildError
from trainer.ops.build.compile_jobs import CompileJob, ask_compiler, run_compilers

_USUAL_FOLDER = Path("/usr/local/cuda")
NVCC_FLAGS = ("-std=c++17", "-O3", "-allow-unsupported-compiler")
"""Flags of nvcc. An unsupported host compiler does no harm, because there is no host code."""


@dataclass(frozen=True)
class Nvcc:
    """An installed nvcc.

    Attributes:
        path: path of the program.
        version: major and minor version of CUDA.
    """

    path: str
    version: tuple[int, int]

    def architectures(self) -> tuple[int, ...]:
        """Supported architectures: 90 for compute capability 9.0.

        Raises:
            BuildError: nvcc does not list its architectures.
        """
        listed = re.findall(r"sm_(\d+)\s*$", ask_compiler((self.path, "--list-gpu-code")), re.MULTILINE)
        if not listed:
            raise BuildError(f"{self.path} --list-gpu-code does not list its architectures")
        return tuple(int(number) for number in listed)

    def compile(
        self, source: Path, target: Path, architecture: int, host_compiler: Sequence[str], deadline: float
    ) -> str:
        """Compile device code into a cubin.

        Args:
            source: a .cu file.
            target: the cubin; its folder receives other files too.
            architecture: one of ``architectures()``.
            host_compiler: command of the C++ compiler that preprocesses for nvcc.
            deadline: deadline by time.monotonic().

        Returns:
            Output of nvcc, with registers, stack and shared memory of each kernel.

        Raises:
            BuildError: the compilation failed; holds the compiler's output.
        """
        output = ("-cubin", f"-arch=sm_{architecture}", "-o", str(target), str(source))
        host = _as_program(host_compiler, target.parent)
        command = (self.path, *NVCC_FLAGS, "-Xptxas", "-v", "-ccbin", host, *output)
        log = target.with_suffix(".log")
        run_compilers([CompileJob(command, log)], 1, deadline)
        return log.read_text(errors="replace")

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]}"


def _as_program(words: Sequence[str], folder: Path) -> str:
    """Wrap a command of several words, such as ``ccache g++``, in one program.

    nvcc accepts only a program without arguments.
    """
    if len(words) == 1:
        return words[0]
    program = folder / "host-c++"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return str(program)


def find_nvcc(packages: Sequence[Path], toolkits: Sequence[Path]) -> Nvcc:
    """Find the first nvcc that runs.

    The order is: the user's toolkits, PATH, the usual folders, Python packages.

    Args:
        packages: folders of Python packages; NVIDIA's packages of the toolkit are in nvidia/.
        toolkits: folders of CUDA toolkits that the user names.

    Raises:
        BuildError: no nvcc was found.
    """
    on_path = shutil.which("nvcc")
    candidates = [folder / "bin" / "nvcc" for folder in toolkits]
    candidates += [Path(on_path)] if on_path is not None else []
    # Conda's nvcc is on the path only if its environment is activated.
    candidates += [folder / "bin" / "nvcc" for folder in (Path(sys.prefix), _USUAL_FOLDER)]
    candidates += [path for folder in packages for path in sorted(folder.glob("nvidia/*/bin/nvcc"))]
    for candidate in candidates:
        if not candidate.exists():
            continue
        release = re.search(r"release (\d+)\.(\d+)", ask_compiler((str(candidate), "--version")))
        if release is not None:
            return Nvcc(str(candidate), (int(release[1]), int(release[2])))
    raise BuildError("no nvcc was found; load a module with nvcc, such as cuda, or set CUDA_HOME")
