"""Building of the emulated GPU: csrc's CUDA kernels and launchers over a fake driver.

The result is one library, which needs no CUDA.
The emulation fakes a GPU's behaviour, but not its speed or the rounding of its functions: kernels run as g++ compiles
them. Products and sums are contracted to fused multiply-adds, the default of nvcc and NVRTC, to find code that relies
on the rounded product.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.trainer.ops.op_checks import as_c
from trainer.ops.build.build import Compiler, find_compiler, sources_key
from trainer.ops.build.build_cache import BuildCache
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.build.compile_jobs import CompileJob, jobs_that_fit, run_compilers
from trainer.ops.build.object_cache import ObjectCache
from trainer.ops.build.sources import op_files, source_files, source_folder

_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-fPIC",
    # A process may hold two emulations with separate kernels and state.
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-clobbered",
    "-O2",
    "-U_FORTIFY_SOURCE",
)
_ENTRY = re.compile(
    r'extern "C"\s+__global__\s+void\s+__launch_bounds__\s*\(([^,)]*)[^)]*\)\s*'
    r"(\w+)\s*\(const\s+__grid_constant__\s+(\w+)"
)
_REGISTERED = re.compile(r'^const Kernel \w+\("(\w+)", KernelTypes::(\w+)\);$', re.MULTILINE)
ORDERS = (0, 1, 12345)
"""Orders of threads and blocks: forwards, backwards, shuffled."""


class EmulatedCuda:
    """The C interface llmctl_cuda_*, over CPU tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # RTLD_GLOBAL, so that the ops' library finds the symbols.
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name in ("llmctl_cuda_error", "emulation_complaint", "emulation_image"):
            getattr(self.library, name).restype = ctypes.c_char_p
        assert self.library.llmctl_cuda_use(0, None) == 0
        self.load(0)

    def load(self, device: int) -> int:
        """Load the image on a device."""
        return int(self.library.llmctl_cuda_load(device, ctypes.c_char_p(self.library.emulation_image())))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a launcher with arguments of op_checks.call, and add the stream.

        Raises:
            RuntimeError: the launcher returned an error.
        """
        error = getattr(self.library, name)(*map(as_c, arguments), ctypes.c_void_p(None))
        if error:
            raise RuntimeError(f"{self.error(error)}: {self.library.emulation_complaint().decode()}")

    def launch(self, name: str, threads: int, arguments: ctypes.Structure) -> None:
        """Launch a kernel with one block, without a launcher.

        Raises:
            RuntimeError: the launch failed.
        """
        function = ctypes.c_void_p()
        assert self.library.cuModuleGetFunction(ctypes.byref(function), None, name.encode()) == 0
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        error = self.library.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, None, parameters, None)
        if error:
            raise RuntimeError(f"{self.error(error)}: {self.library.emulation_complaint().decode()}")

    def size(self, name: str, *arguments: Any) -> int:
        """Call a function that returns an int64_t."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_int64
        return int(function(*map(as_c, arguments)))

    def error(self, code: int) -> str:
        """The library's message for an error code."""
        return str(self.library.llmctl_cuda_error(code).decode())

    @contextmanager
    def order(self, order: int) -> Iterator[None]:
        """Run threads and blocks in one of ORDERS."""
        self.library.emulation_set_order(ctypes.c_uint(order))
        try:
            yield
        finally:
            self.library.emulation_set_order(ctypes.c_uint(0))

    @contextmanager
    def last_blocks(self, count: int) -> Iterator[None]:
        """Run only the last ``count`` blocks of a launch."""
        self.library.emulation_set_last_blocks(ctypes.c_longlong(count))
        try:
            yield
        finally:
            self.library.emulation_set_last_blocks(ctypes.c_longlong(0))


def all_kernels() -> list[Path]:
    """The files with the kernels of a GPU's image."""
    return op_files("cuda.cu")


def registered_kernels() -> dict[str, str]:
    """Name -> element types (a KernelTypes) of every kernel that the launchers register."""
    text = "".join(path.read_text(encoding="utf-8") for path in op_files("launch.cpp"))
    found = _REGISTERED.findall(text)
    assert len(found) == text.count("KernelTypes::"), "a kernel is not registered as the others are"
    return dict(found)


def build_emulation(settings: BuildSettings, name: str, kernels: Sequence[Path], *extra_flags: str) -> Path:
    """The library of ``kernels``, all launchers and the fake driver, built if not cached."""
    compiler = find_compiler(settings.compilers)
    make = partial(_make_emulation, compiler, kernels, extra_flags)
    return _cached(settings, compiler, f"emulated_{name}", extra_flags, make)


def build_emulated_ops(settings: BuildSettings) -> Path:
    """The library of csrc's ops, with the CUDA ops registered for the CPU.

    Load it instead of the native library, after the emulation.
    """
    compiler = find_compiler(settings.compilers)
    return _cached(settings, compiler, "emulated_ops", (), partial(_make_ops, compiler))


def _cached(
    settings: BuildSettings,
    compiler: Compiler,
    name: str,
    flags: Sequence[str],
    make: Callable[[Path, float], None],
) -> Path:
    # sources_key() is compiled in, and also changes with the flags of the real library.
    digest = hashlib.sha256(f"{compiler.version}{flags}{contraction()}{torch.__version__}{sources_key()}".encode())
    for path in (*source_files(), *sorted(_HERE.glob("*"))):
        if path.is_file():
            digest.update(f"{path}\0".encode() + path.read_bytes())
    cache = BuildCache.below(settings.cache)

    def make_room_and_make(target: Path, deadline: float) -> None:
        make(target, deadline)
        cache.remove_disused(f"{name}-*/{name}.so")

    return cache.obtain(f"{name}-{digest.hexdigest()[:16]}/{name}.so", make_room_and_make, print)


def contraction() -> tuple[str, ...]:
    """g++ options to contract products and sums; empty if the processor cannot."""
    if platform.machine() != "x86_64":
        return ("-ffp-contract=fast",)
    has_fma = " fma " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ("-mfma", "-ffp-contract=fast") if has_fma else ()


def _make_emulation(
    compiler: Compiler, kernels: Sequence[Path], extra_flags: Sequence[str], target: Path, deadline: float
) -> None:
    table = target.parent / "kernels.cpp"
    table.write_text(_table(compiler, kernels))
    # block.cpp defines the one sanitizer function that is called.
    parts: list[tuple[Path, tuple[str, ...]]] = [
        (table, ("-include", str(_HERE / "cuda_language.h"), "-fsanitize=alignment", *contraction()))
    ]
    parts += [(_HERE / name, ()) for name in ("block.cpp", "driver.cpp")]
    launchers = [source_folder() / "common" / "launch" / "driver.cpp", *op_files("launch.cpp")]
    parts += [(source, ("-include", str(_HERE / "own_path.h"))) for source in launchers]
    objects = _compile(compiler, [(source, (*extra_flags, *flags)) for source, flags in parts], target, deadline)
    _link(compiler, target, deadline, *extra_flags, *objects, "-ldl")


def _make_ops(compiler: Compiler, target: Path, deadline: float) -> None:
    torch_folder = Path(torch.__file__).parent
    of_torch = ("-isystem", str(torch_folder / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000")
    flags = ("-include", str(_HERE / "cpu_for_cuda.h"), *of_torch, "-O1", "-Wno-unused-function", "-Wno-attributes")
    parts: list[tuple[Path, tuple[str, ...]]] = [
        *((source, flags) for source in op_files("torch.cpp")),
        (source_folder() / "common" / "abi.cpp", (f'-DLLMCTL_SOURCES="{sources_key()}"',)),
        (_HERE / "cpu_levels.cpp", ()),
    ]
    objects = _compile(compiler, parts, target, deadline)
    _link(compiler, target, deadline, *objects, "-L", str(torch_folder / "lib"), "-ltorch_cpu", "-ldl")


def _includes(kernels: Sequence[Path]) -> str:
    return "".join(f'#include "{path}"\n' for path in kernels)


def entry_points(compiler: Compiler, kernels: Sequence[Path]) -> list[tuple[str, str, str]]:
    """Most threads of a block, name and type of the arguments of every kernel."""
    text = subprocess.run(
        [*compiler.command, "-std=c++17", "-E", "-P", "-x", "c++", "-"],
        input=_includes(kernels),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    entries: list[tuple[str, str, str]] = _ENTRY.findall(text)
    assert len(entries) == text.count("__global__"), "an entry point is not one of LLMCTL_CUDA_ENTRY"
    return entries


def _table(compiler: Compiler, kernels: Sequence[Path]) -> str:
    """C++ source of all kernels, and of the fake driver's table of their names."""
    rows = [
        f'    {{"{name}", {threads}, [](const void *a) {{ {name}(*static_cast<const {arguments} *>(a)); }}}},'
        for threads, name, arguments in entry_points(compiler, kernels)
    ]
    lines = [
        *(_includes(kernels), "using namespace llmctl;", "const emulation::Kernel emulation::kernels[] = {"),
        *(*rows, "};", f"const int emulation::num_kernels = {len(rows)};", ""),
    ]
    return "\n".join(lines)


def _compile(
    compiler: Compiler, parts: Sequence[tuple[Path, tuple[str, ...]]], target: Path, deadline: float
) -> list[str]:
    """Objects of sources with their flags, compiled or from the cache."""
    cache = ObjectCache(target.parents[2] / "objects")
    # Files included by a flag.
    ours = "".join(path.read_text() for path in sorted(_HERE.glob("*.h")))
    objects, jobs, names = [], [], {}
    for source, flags in parts:
        made = target.parent / f"{source.parent.name}-{source.stem}.o"
        command = (*compiler.command, *_FLAGS, *flags, "-c", str(source), "-o", str(made))
        job = CompileJob(command, made.with_suffix(".log"))
        objects.append(str(made))
        name = cache.name(source, (compiler.version, torch.__version__, ours, *_FLAGS, *flags))
        if not cache.take(name, made):
            jobs.append(job)
            names[job] = name, made
    run_compilers(jobs, jobs_that_fit(), deadline, lambda job: cache.keep(*names[job]))
    return objects


def _link(compiler: Compiler, target: Path, deadline: float, *words: str) -> None:
    command = (*compiler.command, "-shared", "-Wl,-Bsymbolic", "-o", str(target), *words)
    run_compilers([CompileJob(command, target.with_suffix(".log"))], 1, deadline)
