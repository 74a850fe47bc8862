"""The built library: found, or built on demand, loaded, and its ops made known to torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from trainer.ops.build.build import Compiler, compile_library, find_compiler, library_name, sources_key
from trainer.ops.build.build_cache import LIMIT_S, BuildCache
from trainer.ops.build.build_lock import mark_in_use
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport
from trainer.ops.dispatch.registry import register_operations

LEVELS = ("portable", "x86-64-v3", "x86-64-v4", "x86-64-v4 with AVX512_BF16")
"""Instruction sets of CPU kernels, by llmctl_cpu_level()."""
_ABI = "llmctl_kernels_abi"
_OLDEST_TORCH = (2, 10)
"""As in trainer.ops.build.build: the stable interface of older ones lacks what the binding calls."""


@dataclass(frozen=True)
class Library:
    """The library in this process.

    Attributes:
        path: where it came from.
        level: the instruction set that its CPU kernels run on here.
    """

    path: Path
    level: str

    @property
    def name(self) -> str:
        """What it was built from and by: its place in a BuildCache."""
        return f"{self.path.parent.name}/{self.path.name}"

    def at_level(self, level: str) -> Library:
        """The same with its CPU kernels on one of LEVELS, or the best below it that there is."""
        chosen = ctypes.CDLL(str(self.path)).llmctl_cpu_set_level(LEVELS.index(level))
        return replace(self, level=LEVELS[chosen])

    def processor_level(self) -> str:
        """The best of LEVELS that this processor has, whether or not there are kernels for it."""
        return LEVELS[ctypes.CDLL(str(self.path)).llmctl_cpu_processor_level()]


def load_library(path: Path) -> Library:
    """Load the library at ``path`` into this process; once one is loaded, that one remains.

    Raises:
        OSError: the loader refuses it, or it was built from other sources.
    """
    loaded = loaded_path()
    if loaded is None:
        _load_marked(path)
    used = str(loaded or path)
    handle = ctypes.CDLL(used)
    if not hasattr(handle, _ABI):
        raise OSError(f"{used} is no library of kernels")
    handle.llmctl_kernels_abi.restype = ctypes.c_char_p
    built_from = handle.llmctl_kernels_abi().decode()
    if built_from != sources_key():
        raise OSError(f"{used} was built from other sources, {built_from} instead of {sources_key()}")
    if loaded is None:
        register_operations()
    return Library(Path(used), LEVELS[handle.llmctl_cpu_level()])


def loaded_path() -> Path | None:
    """Of the library in this process; None: there is none."""
    ours = (name for name in torch.ops.loaded_libraries if hasattr(ctypes.CDLL(name), _ABI))
    return next(map(Path, ours), None)


def _load_marked(path: Path) -> None:
    """Make its ops known to torch, and say that the file is in use, until this process ends."""
    mark = mark_in_use(path)
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except BaseException:
        os.close(mark)
        raise


def load_built(settings: BuildSettings, name: str | None = None) -> Library:
    """Load the library that was built for this machine; never builds.

    Args:
        settings: where, and by which compilers.
        name: the one that it has to be, by Library.name; None: that of the compiler here, or else of another.

    Raises:
        BuildError: there is none, or it cannot be loaded.
    """
    _check_torch()
    cache = BuildCache.below(settings.cache)
    if name is not None:
        path = cache.find(name)
        if path is None:
            reason = cache.distrusted(name) or f"{cache.shared} has no {name}"
            raise BuildError(f"the library of the first rank is not to be had here: {reason}")
        return _load(path)
    first, any_name = library_name(_compiler_or_none(settings)), library_name(None)
    found = _first_that_loads(chain(cache.find_all(first), cache.find_all(any_name)))
    if isinstance(found, Library):
        return found
    distrusted = cache.distrusted(any_name)
    problem = f"the library is not built{f' ({distrusted})' if distrusted else ''}"
    raise found or BuildError(f"{problem}; python -m trainer kernels build builds it")


def load_on_demand(settings: BuildSettings, report: LineReport, limit_s: float = LIMIT_S) -> Library:
    """Load the library for this machine, built if it is not there, built once more if it cannot be loaded.

    Where it cannot be built, such as on a node without a compiler, it is the one that another compiler has built.

    Args:
        settings: where, and by which compilers.
        report: is told how the build goes.
        limit_s: for waiting and building together.

    Raises:
        BuildError: says why there is none.
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
        report.say(f"kernels: {error.reason}; {found.path} is used, which another compiler has built")
        return found


def _check_torch() -> None:
    """Say what an older torch lacks, which its compiler would say in hundreds of lines."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise BuildError(
            f"the library serves torch from {oldest} on, and this is {torch.__version__}; install a newer one"
        )


def built_name(settings: BuildSettings) -> str:
    """The name of the library that load_on_demand would build here.

    Raises:
        BuildError: there is no compiler.
    """
    return library_name(find_compiler(settings.compilers))


def _load_or_build(cache: BuildCache, compiler: Compiler, report: LineReport, limit_s: float) -> Library:
    name = library_name(compiler)
    path = cache.find(name)
    if path is not None:
        try:
            return _load(path)
        except BuildError:
            # Built on another node, perhaps, whose system libraries are newer.
            pass
    make = partial(_make, cache, compiler, report)
    return _load(cache.obtain(name, make, report.say, limit_s=limit_s, instead_of=path))


def _make(cache: BuildCache, compiler: Compiler, report: LineReport, target: Path, deadline: float) -> None:
    with report.building(f"with {compiler.version}") as progress:
        compile_library(target, compiler, deadline, progress)
    cache.remove_disused(f"{platform.machine()}-*/*.so")


def _first_that_loads(paths: Iterable[Path]) -> Library | BuildError | None:
    """The first of ``paths`` that loads, or why the first of them does not; None: there are none."""
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
        raise BuildError(f"the library of kernels cannot be loaded: {reason}") from error
