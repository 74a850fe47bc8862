"""Compilation of csrc/ into one library for all versions of torch since 2.10.

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
"""Flags of files without CPU kernels."""
# Not -ffast-math, which would remove the guards against rounding in exp and the tests for infinities. Sums with a free
# order are marked with pragmas for -fopenmp-simd, which needs no OpenMP library.
_KERNEL_FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_UNUSED_FLAGS = (*_KERNEL_FLAGS, "-O1")
"""Flags of kernels that no run uses: portable ones on x86-64, where torch is faster without AVX2 (slow_processor).

With -O3, g++ 12 takes 56 s of one core of a Xeon for them, and with -O1 25 s."""
_V3 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt", "-mmovbe", "-mpopcnt")
_V4 = (*_V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_WIDE = "-mprefer-vector-width=512"
_LEVELS = {
    "v3": (("-march=x86-64-v3",), _V3),
    "v4": (("-march=x86-64-v4", _WIDE), (*_V4, _WIDE), _V4),
}
"""Level of the instruction set (System V psABI) -> alternative flags.

The first flags that the compiler accepts are used: gcc knows the names of the levels since 11, clang since 12."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, and the first line of its --version output."""

    command: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        """Version and options, which determine the compiler's output."""
        return " ".join((self.version, *(word for word in self.command if word.startswith("-"))))


def find_compiler(candidates: Sequence[tuple[str, ...]]) -> Compiler:
    """Find the first of ``candidates`` that runs.

    Raises:
        BuildError: none of the candidates runs.
    """
    for candidate in candidates:
        path = shutil.which(candidate[0])
        said = ask_compiler((path, *candidate[1:], "--version")) if path is not None else ""
        if path is not None and said:
            return Compiler((path, *candidate[1:]), said.splitlines()[0])
    names = ", ".join(" ".join(candidate) for candidate in candidates)
    raise BuildError(f"no C++ compiler ({names}) was found; install g++, or load a module with a compiler, such as gcc")


def sources_key() -> str:
    """Hash of sources and flags, with the machine's architecture: identity of a compatible library."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path.relative_to(source_folder())}\0".encode())
        digest.update(path.read_bytes())
    digest.update(f"{_FLAGS}{_OTHER_FLAGS}{_KERNEL_FLAGS}{_UNUSED_FLAGS}{_LEVELS}{_TARGET_TORCH}".encode())
    return f"{platform.machine()}-{digest.hexdigest()[:16]}"


def library_name(compiler: Compiler | None) -> str:
    """Name of the library in a BuildCache; without a compiler, a glob pattern."""
    which = hashlib.sha256(compiler.identity.encode()).hexdigest()[:8] if compiler is not None else "*"
    return f"{sources_key()}/{which}.so"


def compile_library(
    target: Path,
    compiler: Compiler,
    deadline: float,
    progress: Callable[[float], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Compile and link the library into ``target``.

    Args:
        target: file of the library. Its folder receives the objects; two folders up, ``objects`` caches them.
        compiler: the C++ compiler.
        deadline: deadline by time.monotonic().
        progress: receives the share of the objects that are there, at the start and after each object.
        is_cancelled: asked about twice per second; True ends the build.

    Raises:
        BuildError: the compiler failed, the deadline has passed, or the build is cancelled.
    """
    jobs = _jobs(compiler, target.parent, deadline)
    objects = ObjectCache(target.parents[2] / "objects")
    names = {job: objects.name(job.source, (compiler.identity, torch.__version__, *job.flags)) for job in jobs}
    missing = [job for job in jobs if not objects.take(names[job], job.target)]
    waiting = set(missing)

    def finished(job: _ObjectJob) -> None:
        objects.keep(names[job], job.target)
        waiting.discard(job)
        progress(1 - len(waiting) / len(jobs))

    progress(1 - len(waiting) / len(jobs))
    run_compilers(missing, jobs_that_fit(), deadline, finished, is_cancelled)
    libraries = ("-L", str(Path(torch.__file__).parent / "lib"), "-ltorch_cpu", "-ldl")
    link = (*compiler.command, "-shared", "-o", str(target), *(str(job.target) for job in jobs), *libraries)
    run_compilers([CompileJob(link, target.with_suffix(".log"))], 1, deadline, is_cancelled=is_cancelled)
    objects.clear()


@dataclass(frozen=True)
class _ObjectJob(CompileJob):
    """Compilation of one object file."""

    source: Path
    flags: tuple[str, ...]
    target: Path


def _jobs(compiler: Compiler, folder: Path, deadline: float) -> list[_ObjectJob]:
    """Compile jobs of all objects, slowest first."""
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
    is_x86 = platform.machine() == "x86_64"
    levels = _levels(compiler, folder, deadline) if is_x86 else {}
    without = tuple(f"-DLLMCTL_WITHOUT_{level.upper()}" for level in _LEVELS if level not in levels)
    for source in op_files("cpu.cpp"):
        add(source, *(_UNUSED_FLAGS if is_x86 else _KERNEL_FLAGS), *without)
        for level, flags in levels.items():
            add(source, *_KERNEL_FLAGS, *flags, f"-DLLMCTL_ISA={level}", suffix=f"-{level}")
    for source in op_files("launch.cpp"):
        add(source, *_OTHER_FLAGS)
    add(root / "common" / "abi.cpp", f'-DLLMCTL_SOURCES="{sources_key()}"')
    add(root / "common" / "cpu" / "level.cpp", *_KERNEL_FLAGS, *without)
    add(root / "common" / "launch" / "driver.cpp", *_OTHER_FLAGS)
    return jobs


def _levels(compiler: Compiler, folder: Path, deadline: float) -> dict[str, tuple[str, ...]]:
    """Level -> flags, for the levels that the compiler supports."""
    found: dict[str, tuple[str, ...]] = {}
    for level, ways in _LEVELS.items():
        for flags in ways:
            command = (*compiler.command, *flags, "-x", "c++", "-fsyntax-only", "/dev/null")
            with suppress(BuildError):
                run_compilers([CompileJob(command, folder / "probe.log")], 1, deadline)
                found[level] = flags
                break
    return found
