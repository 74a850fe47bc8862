"""GPU images: csrc's CUDA kernels, compiled for one architecture, cached, and loaded.

nvcc compiles the image, or NVRTC, which torch for CUDA includes, where nvcc cannot. A device has one image.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_cache import LIMIT_S, BuildCache, read_sealed
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport
from trainer.ops.build.nvcc import NVCC_FLAGS, Nvcc, find_nvcc
from trainer.ops.build.nvrtc import NVRTC_FLAGS, Nvrtc, find_nvrtc
from trainer.ops.build.sources import op_files, source_folder

ImageCompiler = Literal["nvcc", "NVRTC"]
IMAGE_COMPILERS: tuple[ImageCompiler, ...] = get_args(ImageCompiler)
"""In the order of preference."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)


@dataclass(frozen=True)
class DeviceImage:
    """An image in use on a device.

    Attributes:
        path: file of the image.
    """

    path: Path

    @property
    def name(self) -> str:
        """Identity of source, flags and compiler, without the architecture.

        Images with the same name give the same results on all architectures.
        """
        return f"{self.path.parent.name}/{self.path.stem.partition('-')[2]}"

    def __str__(self) -> str:
        """Architecture and compiler."""
        return self.path.stem.replace("-", ", ")


def load_device_image(
    library: Path,
    settings: BuildSettings,
    device: torch.device,
    by: ImageCompiler,
    report: LineReport,
    limit_s: float = LIMIT_S,
    *,
    may_build: bool = True,
    name: str | None = None,
) -> DeviceImage:
    """Load an image for a CUDA device into the library, compiled if missing.

    Args:
        library: file of the loaded library.
        settings: cache folder, compilers and CUDA toolkits.
        device: a CUDA device; an image that it already has is replaced.
        by: kind of compiler.
        report: receives a line at the start and the end of a compilation.
        limit_s: limit of waiting and compiling together, in seconds.
        may_build: True to compile an image that is not in the cache.
        name: required DeviceImage.name, which is never compiled; None: any image.

    Raises:
        BuildError: there is no image of this compiler here; the reason names the remedy.
    """
    interface = DeviceInterface(library)
    architecture = _architecture_of(device)
    if name is not None:
        path = _of_name(settings, name, architecture)
    else:
        newest = interface.driver_version()
        path = obtain_image(settings, by, architecture, report, limit_s, newest=newest, may_build=may_build)
    image = read_sealed(path)
    if image is None:
        raise BuildError(f"{path} was just damaged or removed; try again")
    interface.load(torch.cuda.current_device() if device.index is None else device.index, image)
    return DeviceImage(path)


def compiled_name(library: Path, settings: BuildSettings, device: torch.device, by: ImageCompiler) -> str:
    """Name of the image that load_device_image would compile here.

    Raises:
        BuildError: there is no usable compiler.
    """
    newest = DeviceInterface(library).driver_version()
    return f"{_folder()}/{_compiler(settings, by, _architecture_of(device), newest)}"


def obtain_image(
    settings: BuildSettings,
    by: ImageCompiler,
    architecture: int,
    report: LineReport,
    limit_s: float = LIMIT_S,
    *,
    newest: tuple[int, int] | None = None,
    may_build: bool = True,
) -> Path:
    """The sealed file of an image, compiled if missing. Needs no GPU.

    Args:
        settings: cache folder, compilers and CUDA toolkits.
        by: kind of compiler.
        architecture: 90 for compute capability 9.0.
        report: receives a line at the start and the end of a compilation.
        limit_s: limit of waiting and compiling together, in seconds.
        newest: CUDA version that the driver supports; images of a later major version are excluded. None: no limit.
        may_build: True to compile an image that is not in the cache.

    Raises:
        BuildError: the image is not available.
    """
    cache = BuildCache.below(settings.cache)
    try:
        compiler = _compiler(settings, by, architecture, newest)
        if not may_build:
            raise BuildError("the kernels are not compiled; run llmctl env kernels build")
        make = partial(_make, cache, settings, compiler, architecture, report)
        name = f"{_folder()}/sm_{architecture}-{compiler}.cubin"
        return cache.obtain(name, make, report.say, limit_s=limit_s)
    except BuildError as error:
        # An image from another node, such as the login node, or from another compiler is equally valid.
        found = _found(cache, by, architecture, newest)
        if found is None:
            raise
        if error.log:
            report.say(f"kernels: {error.reason}; using {found}, compiled earlier")
        return found


def _of_name(settings: BuildSettings, name: str, architecture: int) -> Path:
    """The file of an image by DeviceImage.name. Raises BuildError if missing."""
    cache = BuildCache.below(settings.cache)
    folder, _, compiler = name.partition("/")
    file = f"{folder}/sm_{architecture}-{compiler}.cubin"
    path = cache.find(file)
    if path is None:
        reason = cache.distrusted(file) or f"{cache.shared} has no {file}"
        raise BuildError(f"the kernels of rank 0 are not available here: {reason}")
    return path


def _architecture_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def device_source() -> str:
    """All cuda.cu files as one translation unit without includes: NVRTC reads no files."""
    root = source_folder().resolve()
    return "\n".join(_flattened(root, path.resolve()) for path in op_files("cuda.cu"))


def _flattened(root: Path, path: Path) -> str:
    name = path.relative_to(root)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        included = _INCLUDE.match(line)
        if included is None:
            lines.append(line)
        else:
            lines += [_flattened(root, (path.parent / included[1]).resolve()), f'#line {number + 1} "{name}"']
    return "\n".join(lines)


def _make(
    cache: BuildCache,
    settings: BuildSettings,
    compiler: Nvcc | Nvrtc,
    architecture: int,
    report: LineReport,
    target: Path,
    deadline: float,
) -> None:
    with report.building(f"for sm_{architecture} with {compiler}"):
        source = target.with_name("kernels.cu")
        source.write_text(device_source(), encoding="utf-8")
        if isinstance(compiler, Nvcc):
            host_compiler = find_compiler(settings.compilers).command
            compiler.compile(source, target, architecture, host_compiler, deadline)
        else:
            compiler.compile(source, target, architecture, deadline)
    cache.remove_disused(f"images-*/sm_{architecture}-*.cubin")


def _compiler(
    settings: BuildSettings, by: ImageCompiler, architecture: int, newest: tuple[int, int] | None
) -> Nvcc | Nvrtc:
    """The installed compiler of a kind. Raises BuildError without a usable one."""
    places = [Path(torch.__file__).parents[1]], settings.cuda_folders
    found: list[Nvcc] | list[Nvrtc] = [find_nvcc(*places)] if by == "nvcc" else find_nvrtc(*places)
    if not found:
        raise BuildError("no NVRTC was found; torch for CUDA includes NVRTC, so install a CUDA build of torch")
    problems = [_problem(compiler, architecture, newest) for compiler in found]
    if problems[0] is not None and None not in problems:
        raise BuildError(problems[0])
    return found[problems.index(None)]


def _problem(compiler: Nvcc | Nvrtc, architecture: int, newest: tuple[int, int] | None) -> str | None:
    """Reason why images of this compiler cannot be used, or None."""
    if newest is not None and compiler.version[0] > newest[0]:
        return (
            f"{compiler} is newer than the driver, which supports CUDA {newest[0]}.{newest[1]}; "
            f"use a CUDA {newest[0]} toolkit or update the driver"
        )
    known = compiler.architectures()
    if architecture not in known:
        return f"{compiler} does not compile for sm_{architecture}, only for sm_{min(known)} to sm_{max(known)}"
    return None


def _folder() -> str:
    """Folder of the images in a BuildCache, by source and flags."""
    inputs = f"{NVCC_FLAGS}{NVRTC_FLAGS}{device_source()}"
    return f"images-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}"


def _found(cache: BuildCache, by: ImageCompiler, architecture: int, newest: tuple[int, int] | None) -> Path | None:
    majors = range(newest[0], 0, -1) if newest is not None else ("*",)
    names = (f"{_folder()}/sm_{architecture}-{by} {major}.*.cubin" for major in majors)
    return next((path for path in map(cache.find_any, names) if path is not None), None)


class DeviceInterface:
    """The library's interface for images: csrc/common/launch/abi.h."""

    def __init__(self, library: Path) -> None:
        """Open the interface of the loaded library at this path."""
        self._library = ctypes.CDLL(str(library))
        self._library.llmctl_cuda_error.restype = ctypes.c_char_p

    def driver_version(self) -> tuple[int, int]:
        """CUDA version that the driver supports."""
        version = ctypes.c_int()
        self._check(self._library.llmctl_cuda_driver_version(ctypes.byref(version)))
        return version.value // 1000, version.value % 1000 // 10

    def load(self, device: int, image: bytes) -> None:
        """Load an image on a device."""
        self._check(self._library.llmctl_cuda_load(ctypes.c_int(device), ctypes.c_char_p(image)))

    def _check(self, error: int) -> None:
        if error:
            raise BuildError(f"the CUDA driver rejects the kernels: {self._library.llmctl_cuda_error(error).decode()}")
