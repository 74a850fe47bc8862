"""NVIDIA's compiler nvcc: found, asked for its version, and run. Torch-free."""

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
"""How it compiles. There is no host code here that a compiler newer than nvcc's list could break."""


@dataclass(frozen=True)
class Nvcc:
    """An nvcc.

    Attributes:
        path: the program.
        version: major and minor number of its CUDA.
    """

    path: str
    version: tuple[int, int]

    def architectures(self) -> tuple[int, ...]:
        """What it compiles for: 90 for compute capability 9.0.

        Raises:
            BuildError: it does not say.
        """
        listed = re.findall(r"sm_(\d+)\s*$", ask_compiler((self.path, "--list-gpu-code")), re.MULTILINE)
        if not listed:
            raise BuildError(f"{self.path} does not say what it compiles for")
        return tuple(int(number) for number in listed)

    def compile(
        self, source: Path, target: Path, architecture: int, host_compiler: Sequence[str], deadline: float
    ) -> str:
        """Compile device code into a cubin.

        Args:
            source: a .cu file.
            target: the cubin; its folder takes other files too.
            architecture: one of ``architectures()``.
            host_compiler: the C++ compiler as its words, which nvcc has preprocess.
            deadline: by time.monotonic().

        Returns:
            What it said: with its options, of each kernel's registers, stack and shared memory.

        Raises:
            BuildError: with what the compiler said.
        """
        output = ("-cubin", f"-arch=sm_{architecture}", "-o", str(target), str(source))
        host = _as_program(host_compiler, target.parent)
        command = (self.path, *NVCC_FLAGS, "-Xptxas", "-v", "-ccbin", host, *output)
        log = target.with_suffix(".log")
        run_compilers([CompileJob(command, log)], 1, deadline, lambda *_: None)
        return log.read_text(errors="replace")

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]}"


def _as_program(words: Sequence[str], folder: Path) -> str:
    """One program that is as good as a command of several words, such as ``ccache g++``: nvcc takes no more."""
    if len(words) == 1:
        return words[0]
    program = folder / "host-c++"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return str(program)


def find_nvcc(packages: Sequence[Path], toolkits: Sequence[Path]) -> Nvcc:
    """The first nvcc that runs: of the toolkits that the user names, on the path, in the usual folders, of a package.

    Args:
        packages: folders of Python packages: those of NVIDIA's toolkit lie in nvidia/.
        toolkits: folders of CUDA toolkits.

    Raises:
        BuildError: there is none.
    """
    on_path = shutil.which("nvcc")
    candidates = [folder / "bin" / "nvcc" for folder in toolkits]
    candidates += [Path(on_path)] if on_path is not None else []
    # The one of Conda is on the path only where its environment has been activated.
    candidates += [folder / "bin" / "nvcc" for folder in (Path(sys.prefix), _USUAL_FOLDER)]
    candidates += [path for folder in packages for path in sorted(folder.glob("nvidia/*/bin/nvcc"))]
    for candidate in candidates:
        if not candidate.exists():
            continue
        release = re.search(r"release (\d+)\.(\d+)", ask_compiler((str(candidate), "--version")))
        if release is not None:
            return Nvcc(str(candidate), (int(release[1]), int(release[2])))
    raise BuildError("no nvcc was found; load a module that has it, such as cuda, or set CUDA_HOME")
