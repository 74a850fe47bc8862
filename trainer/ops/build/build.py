"""Compiling csrc/ into one library that serves every torch from 2.10 on.

Each operation has a folder: kernels for CPUs (cpu.cpp) and launchers of CUDA kernels (launch.cpp) behind a C interface
(abi.h), without headers of torch, and a binding on torch's stable ABI (torch.cpp). The library needs libtorch_cpu.so
alone: functions of CUDA's driver are looked up at the first call.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.ops.build.build_settings import BuildError
from trainer.ops.build.compile_jobs import CompileJob, ask_compiler, jobs_that_fit, run_compilers
from trainer.ops.build.object_cache import ObjectCache
from trainer.ops.build.sources import op_files, source_files, source_folder

_TARGET_TORCH = "0x020a000000000000"
"""Torch 2.10, in torch/csrc/stable/version.h's encoding."""
_FLAGS = ("-std=c++17", "-fPIC", "-Wall", "-Wextra")
_OTHER_FLAGS = ("-O2",)
"""Of what is no kernel for the CPU."""
# Not -ffast-math: it would take the guards against rounding out of exp, and infinities out of the tests for them. Sums
# say themselves where their order is free, which -fopenmp-simd listens to (and which needs no OpenMP).
_KERNEL_FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_V3 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt", "-mmovbe", "-mpopcnt")
_V4 = (*_V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_WIDE = "-mprefer-vector-width=512"
_LEVELS = {
    "v3": (("-march=x86-64-v3",), _V3),
    "v4": (("-march=x86-64-v4", _WIDE), (*_V4, _WIDE), _V4),
}
"""Level of the instruction set (System V psABI) -> ways to ask for it, of which the first that a compiler takes is
used: gcc knows the levels' names from 11 on, clang from 12 on."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words that start it, and the first line it says about itself."""

    command: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        """What it makes of a source depends on: its version, and the options that it is started with."""
        return " ".join((self.version, *(word for word in self.command if word.startswith("-"))))


def find_compiler(candidates: Sequence[tuple[str, ...]]) -> Compiler:
    """The first of ``candidates`` that runs.

    Raises:
        BuildError: none does.
    """
    for candidate in candidates:
        path = shutil.which(candidate[0])
        said = ask_compiler((path, *candidate[1:], "--version")) if path is not None else ""
        if path is not None and said:
            return Compiler((path, *candidate[1:]), said.splitlines()[0])
    names = ", ".join(" ".join(candidate) for candidate in candidates)
    raise BuildError(f"no C++ compiler ({names}) was found; install g++, or load a module that has it, such as gcc")


def sources_key() -> str:
    """What a built library is good for: this architecture, these sources, compiled in this manner."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path.relative_to(source_folder())}\0".encode())
        digest.update(path.read_bytes())
    digest.update(f"{_FLAGS}{_OTHER_FLAGS}{_KERNEL_FLAGS}{_LEVELS}{_TARGET_TORCH}".encode())
    return f"{platform.machine()}-{digest.hexdigest()[:16]}"


def library_name(compiler: Compiler | None) -> str:
    """Where the library stands in a BuildCache; without a compiler a pattern for those of all compilers."""
    which = hashlib.sha256(compiler.identity.encode()).hexdigest()[:8] if compiler is not None else "*"
    return f"{sources_key()}/{which}.so"


def compile_library(target: Path, compiler: Compiler, deadline: float, progress: Callable[[int, int], None]) -> None:
    """Compile and link into ``target``.

    Args:
        target: the file. Its folder takes the objects; two folders up they are kept, in ``objects``.
        compiler: what compiles.
        deadline: by time.monotonic().
        progress: is told how many files are done, and of how many.

    Raises:
        BuildError: the compiler said no, or the deadline has passed.
    """
    jobs = _jobs(compiler, target.parent, deadline)
    objects = ObjectCache(target.parents[2] / "objects")
    names = {job: objects.name(job.source, (compiler.identity, torch.__version__, *job.flags)) for job in jobs}
    missing = [job for job in jobs if not objects.take(names[job], job.target)]
    total = len(jobs) + 1
    run_compilers(
        missing,
        jobs_that_fit(),
        deadline,
        lambda done, _: progress(total - 1 - len(missing) + done, total),
        lambda job: objects.keep(names[job], job.target),
    )
    libraries = ("-L", str(Path(torch.__file__).parent / "lib"), "-ltorch_cpu", "-ldl")
    link = (*compiler.command, "-shared", "-o", str(target), *(str(job.target) for job in jobs), *libraries)
    run_compilers([CompileJob(link, target.with_suffix(".log"))], 1, deadline, lambda *_: progress(total, total))
    objects.clear()


@dataclass(frozen=True)
class _ObjectJob(CompileJob):
    """The compilation of one object."""

    source: Path
    flags: tuple[str, ...]
    target: Path


def _jobs(compiler: Compiler, folder: Path, deadline: float) -> list[_ObjectJob]:
    """What makes the objects, those that take longest first."""
    root = source_folder()
    jobs: list[_ObjectJob] = []

    def add(source: Path, *more: str, suffix: str = "") -> None:
        target, flags = folder / f"{source.parent.name}-{source.stem}{suffix}.o", (*_FLAGS, *more)
        command = (*compiler.command, *flags, "-c", str(source), "-o", str(target))
        jobs.append(_ObjectJob(command, target.with_suffix(".log"), source, flags, target))

    include = Path(torch.__file__).parent / "include"
    of_torch = (f"-DTORCH_TARGET_VERSION={_TARGET_TORCH}", "-isystem", str(include))
    for source in op_files("torch.cpp"):
        add(source, *_OTHER_FLAGS, *of_torch)
    levels = _levels(compiler, folder, deadline) if platform.machine() == "x86_64" else {}
    without = tuple(f"-DLLMCTL_WITHOUT_{level.upper()}" for level in _LEVELS if level not in levels)
    for source in op_files("cpu.cpp"):
        add(source, *_KERNEL_FLAGS, *without)
        for level, flags in levels.items():
            add(source, *_KERNEL_FLAGS, *flags, f"-DLLMCTL_ISA={level}", suffix=f"-{level}")
    for source in op_files("launch.cpp"):
        add(source, *_OTHER_FLAGS)
    for source in sorted((root / "data").glob("*.cpp")):
        add(source, *_KERNEL_FLAGS)
    add(root / "common" / "abi.cpp", f'-DLLMCTL_SOURCES="{sources_key()}"')
    add(root / "common" / "cpu" / "level.cpp", *_KERNEL_FLAGS, *without)
    add(root / "common" / "launch" / "driver.cpp", *_OTHER_FLAGS)
    return jobs


def _levels(compiler: Compiler, folder: Path, deadline: float) -> dict[str, tuple[str, ...]]:
    """Level -> flags, of the levels that the compiler can compile for."""
    found: dict[str, tuple[str, ...]] = {}
    for level, ways in _LEVELS.items():
        for flags in ways:
            command = (*compiler.command, *flags, "-x", "c++", "-fsyntax-only", "/dev/null")
            with suppress(BuildError):
                run_compilers([CompileJob(command, folder / "probe.log")], 1, deadline, lambda *_: None)
                found[level] = flags
                break
    return found
