"""What every command gets from the entry point, and how commands print: people on a terminal, plain text in a pipe."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.resources import UserFolders
from llmctl.transport import LocalTransport

if TYPE_CHECKING:
    from rich.console import Console

    from llmctl.profile import ClusterProfile
    from llmctl.run_record import RunIndex


@dataclass(frozen=True)
class Invocation:
    """One call of llmctl: the world as the entry point found it, handed on through typer's ``Context.obj``.

    Attributes:
        argv: as typed, ``llmctl`` first.
        environ: the environment; nothing else of llmctl reads it.
        cwd: the working directory, absolute.
        folders: the user's folders.
        transport: hands on this machine.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    folders: UserFolders
    transport: LocalTransport

    @classmethod
    def of(cls, argv: tuple[str, ...], environ: Mapping[str, str], cwd: Path) -> "Invocation":
        """The invocation that the process's argv, environment and working directory make."""
        return cls(argv, environ, cwd, UserFolders.from_environment(environ), LocalTransport(environ))

    @property
    def index(self) -> "RunIndex":
        """The index of this user's runs."""
        from llmctl.run_record import RunIndex

        return RunIndex(self.folders.state)

    def profile(self, name: str, origin: str = "--cluster") -> "ClusterProfile":
        """A cluster's profile; LLMCTL_RUNS_ROOT goes before its runs_root, which comes back absolute.

        Raises:
            UsageError: ``origin`` is a flag and no cluster has this name.
            ProfileError: the same from elsewhere, or a profile that cannot be used.
        """
        from llmctl.profile import expand_home, load_profile

        profile = load_profile(self.folders, name, origin)
        root = expand_home(self.environ.get("LLMCTL_RUNS_ROOT") or profile.runs_root, self.folders)
        return profile.model_copy(update={"runs_root": os.path.normpath(self.cwd / root)})


def is_for_people() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def rich_console() -> "Console":
    """A rich console on standard output, which is slow to import: ask for it only where a table or colour is due."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, indent=1))


def say(message: str) -> None:
    """A remark for people, on standard error so that output stays clean for a pipe."""
    print(message, file=sys.stderr)
