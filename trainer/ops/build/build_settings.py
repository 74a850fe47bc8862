"""What every build starts with: settings of the entry point's environment, its error, and its report. Torch-free."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.config.errors import ConfigError

_COMPILERS = ("g++", "c++", "clang++")
_Result = TypeVar("_Result")


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


class BuildError(Exception):
    """What was to be built could not be.

    Attributes:
        reason: one sentence, with what to do where there is something.
        log: all that the compiler said; empty if it was not asked.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log


def outcome_of(task: Callable[[], _Result]) -> _Result | BuildError:
    """The result of ``task``, or why there is none, whatever it failed with.

    An error that left here would keep the other ranks of the job waiting, who do without what could not be had.
    """
    try:
        return task()
    except BuildError as error:
        return error
    except Exception as error:
        said = str(error).strip().splitlines()
        return BuildError(f"{type(error).__name__}: {said[0] if said else 'no message'}", traceback.format_exc())


class LineReport:
    """Says when a build begins and when it is done."""

    def say(self, line: str) -> None:
        """A line on standard output."""
        print(line, flush=True)

    @contextmanager
    def building(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """One line before, one after."""
        self.say(f"kernels: building {what}, once for this machine")
        began = time.monotonic()
        yield lambda *_: None
        self.say(f"kernels: built in {time.monotonic() - began:.0f} s")


class TerminalReport(LineReport):
    """Shows a bar meanwhile."""

    @contextmanager
    def building(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A bar, which leaves a line."""
        from rich.progress import Progress

        began = time.monotonic()
        with Progress(transient=True) as bar:
            task = bar.add_task(f"building {what}", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        self.say(f"kernels: built {what} in {time.monotonic() - began:.0f} s")


def report_here() -> LineReport:
    """The report that suits standard output."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return TerminalReport()
    return LineReport()
