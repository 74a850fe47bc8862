"""NVRTC, NVIDIA's runtime compiler for device code, which torch for CUDA includes. Torch-free.

Source of all functions and options: https://docs.nvidia.com/cuda/nvrtc/index.html.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.ops.build.build_settings import BuildError
from trainer.ops.build.compile_jobs import CompileJob, run_compilers

NVRTC_FLAGS = ("--std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space")
"""Flags of NVRTC. All code is device code, including lambdas, which cannot be annotated."""
_USUAL_FOLDER = Path("/usr/local/cuda")
_NEEDED = ("nvrtcGetCUBIN", "nvrtcGetSupportedArchs", "nvrtcGetErrorString")
_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from trainer.ops.build.nvrtc import main; main(*sys.argv[2:])"
_ROOT = Path(__file__).parents[3]


class Nvrtc:
    """An installed libnvrtc.

    Attributes:
        path: path or name with which the library was opened.
        version: major and minor version of CUDA.
    """

    def __init__(self, path: str) -> None:
        """Open the library.

        Raises:
            OSError: the file cannot be loaded, or is not NVRTC.
        """
        self.path = path
        # NVRTC opens libnvrtc-builtins by name, and its packages set no search path: load it from the same folder.
        halves = sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if "/" in path else []
        self._builtins = [ctypes.CDLL(str(half)) for half in halves]
        self._library = ctypes.CDLL(path)
        if not all(hasattr(self._library, name) for name in _NEEDED):
            raise OSError(f"{path} is not NVRTC, or is older than CUDA 11.2")
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Supported architectures: 90 for compute capability 9.0."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        return tuple(numbers)

    def compile(self, source: Path, target: Path, architecture: int, deadline: float) -> str:
        """Compile device code into a cubin, in a separate process.

        The process can be killed at the deadline, and a crash of NVRTC does not affect the caller.

        Args:
            source: a file without includes.
            target: the cubin; its folder receives a log too.
            architecture: one of ``architectures()``.
            deadline: deadline by time.monotonic().

        Returns:
            Output of NVRTC, with registers, stack and shared memory of each kernel.

        Raises:
            BuildError: the compilation failed; holds the compiler's output.
        """
        log = target.with_suffix(".log")
        # -I isolates the process from the user's variables and packages: it imports only trainer and Python's library.
        command = (sys.executable, "-I", "-c", _CHILD, str(_ROOT), self.path, str(source), str(target))
        try:
            run_compilers([CompileJob((*command, str(architecture)), log)], 1, deadline)
        except BuildError as error:
            raise BuildError(f"{self}: {error.reason}", error.log) from error
        said = log.read_text(errors="replace")
        if not target.exists():
            first = next((line.strip() for line in said.splitlines() if "error" in line), "no message")
            raise BuildError(f"{self} refused the kernels: {first}", said)
        return said

    def compile_here(self, source: str, name: str, architecture: int) -> tuple[str, bytes | None]:
        """Compile in this process: the output, and the cubin or None for invalid source.

        Args:
            source: device code without includes.
            name: name of the source in messages.
            architecture: one of ``architectures()``.

        Raises:
            BuildError: NVRTC itself failed.
        """
        program = ctypes.c_void_p()
        created = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), ctypes.c_int(0), None, None
        )
        self._check(created)
        try:
            flags = [f"--gpu-architecture=sm_{architecture}".encode(), *(flag.encode() for flag in NVRTC_FLAGS)]
            options = (ctypes.c_char_p * len(flags))(*flags)
            error = self._library.nvrtcCompileProgram(program, ctypes.c_int(len(flags)), options)
            log = self._text(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if error:
                return log or f"error: {self._error(error)}", None
            return log, self._text(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        memory = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, memory))
        return memory.raw

    def _error(self, error: int) -> str:
        return str(self._library.nvrtcGetErrorString(error).decode())

    def _check(self, error: int) -> None:
        if error:
            raise BuildError(f"NVRTC ({self.path}) failed: {self._error(error)}")


def find_nvrtc(packages: Sequence[Path], toolkits: Sequence[Path]) -> list[Nvrtc]:
    """Find all installed NVRTC libraries, in order of preference.

    Args:
        packages: folders of Python packages; torch's wheels install NVRTC below nvidia/.
        toolkits: folders of CUDA toolkits that the user names.
    """
    # Only libnvrtc.so itself: the folder also contains its builtins and an alternative build.
    candidates = [str(path) for folder in packages for path in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*"))]
    # Conda's torch installs NVRTC beside Python's libraries.
    for folder in (*toolkits, Path(sys.prefix), _USUAL_FOLDER):
        candidates += [str(path) for path in sorted(folder.glob("lib*/libnvrtc.so.*"))]
    # find_library runs a linker, which needs a temporary folder.
    with suppress(OSError):
        installed = ctypes.util.find_library("nvrtc")
        candidates += [installed] if installed is not None else []
    found: dict[Path | str, Nvrtc] = {}
    for candidate in candidates:
        key = Path(candidate).resolve() if "/" in candidate else candidate
        if key in found:
            continue
        try:
            found[key] = Nvrtc(candidate)
        except (OSError, BuildError):
            continue
    return list(found.values())


def main(library: str, source: str, target: str, architecture: str) -> None:
    """Compile a file with the NVRTC at ``library``, in the process of ``Nvrtc.compile``.

    Prints the compiler's output. Writes ``target`` only on success.
    """
    path = Path(source)
    log, image = Nvrtc(library).compile_here(path.read_text(encoding="utf-8"), path.name, int(architecture))
    print(log)
    if image is not None:
        Path(target).write_bytes(image)
