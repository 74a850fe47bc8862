"""The native library: found in the cache or built, and loaded."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from trainer.ops.build.build import Compiler, compile_library, find_compiler, library_name, sources_key
from trainer.ops.build.build_cache import LIMIT_S, BuildCache
from trainer.ops.build.build_lock import mark_in_use
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport

LEVELS = ("portable", "x86-64-v3", "x86-64-v4", "x86-64-v4 with AVX512_BF16")
"""Instruction sets of CPU kernels, indexed by llmctl_cpu_level()."""
_ABI = "llmctl_kernels_abi"
_OLDEST_TORCH = (2, 10)
"""As in trainer.ops.build.build: older stable ABIs lack functions that the binding calls."""


@dataclass(frozen=True)
class Library:
    """The library loaded in this process.

    Attributes:
        path: file of the library.
        level: instruction set in use by the CPU kernels.
    """

    path: Path
    level: str

    @property
    def name(self) -> str:
        """Identity of sources and compiler: the file's path in a BuildCache."""
        return f"{self.path.parent.name}/{self.path.name}"

    def at_level(self, level: str) -> Library:
        """Switch the CPU kernels to one of LEVELS or the best available level below."""
        chosen = ctypes.CDLL(str(self.path)).llmctl_cpu_set_level(LEVELS.index(level))
        return replace(self, level=LEVELS[chosen])

    def processor_level(self) -> str:
        """The best of LEVELS that this processor supports, even without kernels for it."""
        return LEVELS[ctypes.CDLL(str(self.path)).llmctl_cpu_processor_level()]


def load_library(path: Path) -> Library:
    """Load the library at ``path``, unless this process has loaded one already.

    Raises:
        OSError: the loader rejects the file, or the library was built from other sources.
    """
    loaded = loaded_path()
    if loaded is None:
        _load_marked(path)
    used = str(loaded or path)
    handle = ctypes.CDLL(used)
    if not hasattr(handle, _ABI):
        raise OSError(f"{used} is not a kernel library")
    handle.llmctl_kernels_abi.restype = ctypes.c_char_p
    built_from = handle.llmctl_kernels_abi().decode()
    if built_from != sources_key():
        raise OSError(f"{used} was built from other sources ({built_from}, not {sources_key()})")
    return Library(Path(used), LEVELS[handle.llmctl_cpu_level()])


def loaded_path() -> Path | None:
    """Path of the library loaded in this process, or None."""
    ours = (name for name in torch.ops.loaded_libraries if hasattr(ctypes.CDLL(name), _ABI))
    return next(map(Path, ours), None)


def _load_marked(path: Path) -> None:
    """Load the library with torch, and mark its file as in use."""
    mark = mark_in_use(path)
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except BaseException:
        os.close(mark)
        raise


def load_built(settings: BuildSettings, name: str | None = None) -> Library:
    """Load an existing library for this machine. Never builds.

    Args:
        settings: cache folder and compilers.
        name: required Library.name; None: the library of this machine's compiler, or of any compiler.

    Raises:
        BuildError: there is no such library, or the library cannot be loaded.
    """
    _check_torch()
    cache = BuildCache.below(settings.cache)
    if name is not None:
        path = cache.find(name)
        if path is None:
            reason = cache.distrusted(name) or f"{cache.shared} has no {name}"
            raise BuildError(f"the library of rank 0 is not available here: {reason}")
        return _load(path)
    first, any_name = library_name(_compiler_or_none(settings)), library_name(None)
    found = _first_that_loads(chain(cache.find_all(first), cache.find_all(any_name)))
    if isinstance(found, Library):
        return found
    distrusted = cache.distrusted(any_name)
    problem = f"the library is not built{f' ({distrusted})' if distrusted else ''}"
    raise found or BuildError(f"{problem}; run llmctl env kernels build")


def load_on_demand(settings: BuildSettings, report: LineReport, limit_s: float = LIMIT_S) -> Library:
    """Load the library for this machine, built if it is missing.

    A library that fails to load is rebuilt. If the build is impossible, such as on a node without a compiler, the
    library of another compiler is loaded.

    Args:
        settings: cache folder and compilers.
        report: receives a line at the start and the end of a build.
        limit_s: limit of waiting and building together, in seconds.

    Raises:
        BuildError: no library is available; the reason says why.
    """
    _check_torch()
    cache = BuildCache.below(settings.cache)
    try:
        compiler = find_compiler(settings.compilers)
    except BuildError as error:
        found = _first_that_loads(cache.find_all(library_name(None)))
        if isinstance(found, Library):
            return found
        raise error if found is None else BuildError(f"{found.reason}; {error.reason}") from None
    try:
        return _load_or_build(cache, compiler, report, limit_s)
    except BuildError as error:
        own = Path(library_name(compiler)).name
        found = _first_that_loads(path for path in cache.find_all(library_name(None)) if path.name != own)
        if not isinstance(found, Library):
            raise
        report.say(f"kernels: {error.reason}; using {found.path}, built by another compiler")
        return found


def _check_torch() -> None:
    """Raise BuildError for an old torch, instead of hundreds of lines of compiler errors."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise BuildError(
            f"the library needs torch {oldest} or newer, and this is torch {torch.__version__}; install a newer torch"
        )


def built_name(settings: BuildSettings) -> str:
    """Name of the library that load_on_demand would build here.

    Raises:
        BuildError: there is no compiler.
    """
    return library_name(find_compiler(settings.compilers))


def is_unbuilt(settings: BuildSettings) -> bool:
    """True if this machine's compiler could build the library, and the cache has none of it.

    Raises:
        BuildError: there is no compiler, or torch is too old.
    """
    _check_torch()
    return BuildCache.below(settings.cache).find(built_name(settings)) is None


def build_unloaded(
    settings: BuildSettings, report: LineReport, is_cancelled: Callable[[], bool], limit_s: float
) -> None:
    """Build the library of this machine's compiler if it is missing, and load nothing.

    Args:
        settings: cache folder and compilers.
        report: receives the progress of the build, and a line for each wait.
        is_cancelled: asked about twice per second; True ends the build.
        limit_s: limit of waiting and building together, in seconds.

    Raises:
        BuildError: the build is impossible, failed, or was cancelled.
    """
    cache, compiler = BuildCache.below(settings.cache), find_compiler(settings.compilers)
    make = partial(_make, cache, compiler, report, is_cancelled=is_cancelled)
    cache.obtain(library_name(compiler), make, report.say, limit_s=limit_s)


def _load_or_build(cache: BuildCache, compiler: Compiler, report: LineReport, limit_s: float) -> Library:
    name = library_name(compiler)
    path = cache.find(name)
    if path is not None:
        try:
            return _load(path)
        except BuildError:
            # Perhaps built on another node with newer system libraries.
            pass
    make = partial(_make, cache, compiler, report)
    return _load(cache.obtain(name, make, report.say, limit_s=limit_s, instead_of=path))


def _make(
    cache: BuildCache,
    compiler: Compiler,
    report: LineReport,
    target: Path,
    deadline: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    with report.building(f"with {compiler.version}"):
        compile_library(target, compiler, deadline, report.progress, is_cancelled)
    cache.remove_disused(f"{platform.machine()}-*/*.so")


def _first_that_loads(paths: Iterable[Path]) -> Library | BuildError | None:
    """The first library that loads, or the first path's error; None without paths."""
    problem = None
    for path in paths:
        try:
            return _load(path)
        except BuildError as error:
            problem = problem or error
    return problem


def _compiler_or_none(settings: BuildSettings) -> Compiler | None:
    try:
        return find_compiler(settings.compilers)
    except BuildError:
        return None


def _load(path: Path) -> Library:
    try:
        return load_library(path)
    except OSError as error:
        reason = str(error.__cause__ or error)
        raise BuildError(f"the kernel library cannot be loaded: {reason}") from error
