"""Locations of files: user folders (XDG base directories), and what comes with llmctl.

The user's own files come first, then the copies bundled in the wheel, then those of a checkout.
Source: XDG Base Directory Specification 0.8, https://specifications.freedesktop.org/basedir-spec/latest/
"""

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmctl.errors import ProfileError, UsageError

PACKAGE = Path(__file__).resolve().parent
BUNDLED = PACKAGE / "_bundled" if (PACKAGE / "_bundled").is_dir() else PACKAGE.parent
"""Folder of the ``templates``, ``clusters``, ``examples``, ``csrc`` and ``docs``, in the wheel or checkout."""
TRAINER = PACKAGE.parent / "trainer"
"""The trainer package that comes with this llmctl."""
CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class Machine(Protocol):
    """Part of a Transport that knows what ``~`` and variables stand for."""

    @property
    def host(self) -> str:
        """See Transport."""

    def home(self) -> str:
        """See Transport."""

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """See Transport."""


@dataclass(frozen=True)
class UserFolders:
    """The user's own folders. None of them has to exist.

    Attributes:
        home: the home directory.
        config: clusters/NAME.yaml (overlays and own profiles), templates/, config.yaml.
        state: the index of runs, site messages that were shown, the last good answer of each Python about torch, and
            secrets that runs on this machine have not read yet.
    """

    home: Path
    config: Path
    state: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "UserFolders":
        """Build the folders from XDG_CONFIG_HOME and XDG_STATE_HOME, or their defaults in the home directory."""
        home = Path(environ.get("HOME") or Path.home())
        return cls(
            home,
            config=_base(environ, "XDG_CONFIG_HOME", home / ".config") / "llmctl",
            state=_base(environ, "XDG_STATE_HOME", home / ".local/state") / "llmctl",
        )

    @property
    def config_file(self) -> Path:
        """The user's config file: the default cluster, and places of notices."""
        return self.config / "config.yaml"

    @property
    def clusters(self) -> Path:
        """The user's overlays and own profiles."""
        return self.config / "clusters"

    @property
    def secrets(self) -> Path:
        """Folder of secret values on their way to a job on this machine."""
        return self.state / "secrets"


def working_directory() -> Path:
    """The working directory, absolute.

    Raises:
        UsageError: it was removed.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory: {error.strerror}; change to an existing one") from None


def import_own_trainer() -> None:
    """Import the package ``trainer`` beside this llmctl, before any other on Python's path.

    The working directory of ``python -m llmctl``, PYTHONPATH and the installed packages may have another one.
    """
    spec = importlib.util.spec_from_file_location("trainer", TRAINER / "__init__.py")
    if spec is not None and spec.loader is not None:
        sys.modules["trainer"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["trainer"])


def search_path(folders: UserFolders, kind: str) -> tuple[Path, ...]:
    """Folders that may hold files of a kind, in order of precedence."""
    return (folders.config / kind, BUNDLED / kind)


def profile_files(folders: UserFolders, name: str) -> list[Path]:
    """The files of a cluster's profile in order of layering, topmost last; empty if there are none."""
    if not CLUSTER_NAME.fullmatch(name):
        return []
    found = [folder / f"{name}.yaml" for folder in reversed(search_path(folders, "clusters"))]
    return [path for path in found if path.is_file()]


def _base(environ: Mapping[str, str], variable: str, default: Path) -> Path:
    # "All paths set in these environment variables must be absolute. If [...] relative, ignore it."
    value = Path(environ.get(variable, ""))
    return value if value.is_absolute() else default


def expand_home(path: str, folders: UserFolders) -> Path:
    """Replace a leading ``~`` of ``path`` by the home directory."""
    return folders.home / path[2:] if path.startswith("~/") else folders.home if path == "~" else Path(path)


def expand(path: str, machine: Machine) -> str:
    """Replace a leading ``~`` and the variables of a path. Asks the machine only if the path has one of them.

    Raises:
        ProfileError: a variable is not set there.
        SchedulerError: the machine does not answer.
    """
    if "$" in path:
        from trainer.config.paths.variables import names_in, unset_problem, variables_in, with_variables

        path = with_variables(path, machine.variables(variables_in(path)))
        if left := names_in(path):
            raise ProfileError(unset_problem(left, machine.host))
    return machine.home() + path[1:] if path == "~" or path.startswith("~/") else path
