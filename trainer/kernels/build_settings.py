"""Where kernels are built and kept, as the entry point's environment says. Torch-free."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config_error import ConfigError

_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True)
class BuildSettings:
    """What a build needs to know of the user's environment.

    Attributes:
        cache: folder of what is built once and kept.
        compilers: commands that compile C++, each as its words, in the order in which they are tried.
        cuda_folders: where the user says that a CUDA toolkit is.
    """

    cache: Path
    compilers: tuple[tuple[str, ...], ...] = tuple((name,) for name in _COMPILERS)
    cuda_folders: tuple[Path, ...] = ()

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> BuildSettings:
        """By LLMCTL_CACHE_DIR, or below XDG_CACHE_HOME or the home directory; by CXX; by CUDA_HOME and CUDA_PATH.

        Source of the defaults: XDG Base Directory Specification 0.8.

        Raises:
            ConfigError: CXX is no command, or there is no home directory to go by.
        """
        text = variables.get("CXX", "")
        try:
            named = tuple(shlex.split(text))
        except ValueError as error:
            problem = f"{text!r} in the environment is no command ({str(error).lower()}); set it to one such as g++-12"
            raise ConfigError("CXX", problem) from None
        compilers = ((named,) if named else ()) + cls.compilers
        folders = tuple(Path(variables[name]) for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name))
        return cls(_cache_folder(variables), compilers, folders)


def _cache_folder(variables: Mapping[str, str]) -> Path:
    own = variables.get("LLMCTL_CACHE_DIR")
    base = Path(variables.get("XDG_CACHE_HOME", ""))
    try:
        if own:
            return Path(own).expanduser().absolute()
        if base.is_absolute():
            return base / "llmctl"
        return Path(variables.get("HOME") or Path.home()) / ".cache" / "llmctl"
    except RuntimeError:
        # Of pathlib: the user is in no list, as in a container that is run under a foreign number.
        raise ConfigError("LLMCTL_CACHE_DIR", "there is no home directory; set it to a folder that is kept") from None
