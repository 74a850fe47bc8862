"""Settings of builds from the environment, the build error, and reports. Torch-free."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.config.errors import ConfigError

_COMPILERS = ("g++", "c++", "clang++")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BuildSettings:
    """Settings of a build from the user's environment.

    Attributes:
        cache: the user's cache folder.
        compilers: commands of C++ compilers, each as its words, in the order of trial.
        cuda_folders: folders of CUDA toolkits that the user names.
    """

    cache: Path
    compilers: tuple[tuple[str, ...], ...] = tuple((name,) for name in _COMPILERS)
    cuda_folders: tuple[Path, ...] = ()

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> BuildSettings:
        """Read the settings from environment variables.

        The cache is LLMCTL_CACHE_DIR, or a folder below XDG_CACHE_HOME or the home directory (XDG Base Directory
        Specification 0.8). CXX names a compiler, CUDA_HOME and CUDA_PATH name toolkits.

        Raises:
            ConfigError: CXX is not a command, or there is no home directory.
        """
        text = variables.get("CXX", "")
        try:
            named = tuple(shlex.split(text))
        except ValueError as error:
            problem = f"{text!r} is not a command ({str(error).lower()}); set CXX to a command such as g++-12"
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
        # From pathlib: the user id has no entry in the user database, as in containers with a foreign user id.
        raise ConfigError("LLMCTL_CACHE_DIR", "there is no home directory; set a persistent absolute path") from None


class BuildError(Exception):
    """A build failed.

    Attributes:
        reason: one sentence, with the remedy if there is one.
        log: complete output of the compiler; empty if no compiler ran.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log


def joined(errors: Sequence[BuildError]) -> BuildError:
    """One error with each reason once and all logs."""
    reasons = dict.fromkeys(error.reason for error in errors)
    return BuildError("; ".join(reasons), "\n".join(error.log for error in errors if error.log))


def outcome_of(task: Callable[[], _Result]) -> _Result | BuildError:
    """The result of ``task``, or a BuildError for any exception.

    An exception that escaped would leave the other ranks of the job waiting.
    """
    try:
        return task()
    except BuildError as error:
        return error
    except Exception as error:
        lines = str(error).strip().splitlines()
        return BuildError(f"{type(error).__name__}: {lines[0] if lines else 'no message'}", traceback.format_exc())


class LineReport:
    """Report the start and the end of a build, one line each."""

    def progress(self, share: float | None) -> None:
        """Show the share of the files that are compiled; None: nothing is being compiled. Nothing is shown here."""

    def say(self, line: str) -> None:
        """Print a line on standard output."""
        print(line, flush=True)

    @contextmanager
    def building(self, what: str) -> Iterator[None]:
        """Report the start and the end of building ``what``."""
        self.say(f"kernels: building {what}, once for this machine")
        began = time.monotonic()
        try:
            yield
        finally:
            self.progress(None)
        self.say(f"kernels: built in {time.monotonic() - began:.0f} s")
