"""One call of llmctl: the world as the entry point found it. Everything else takes it as an argument."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.errors import ProfileError
from llmctl.resources import UserFolders

if TYPE_CHECKING:
    from llmctl.profile import ClusterProfile
    from llmctl.run_record import RunIndex
    from llmctl.transport import LocalTransport


@dataclass(frozen=True)
class Invocation:
    """One call of llmctl: the world as the entry point found it, handed on through typer's ``Context.obj``.

    Attributes:
        argv: as typed, ``llmctl`` first.
        command: what stood after ``--``; empty if nothing did.
        environment: the environment variables; nothing else of llmctl reads it.
        cwd: the working directory, absolute.
        folders: the user's folders.
    """

    argv: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    folders: UserFolders

    @classmethod
    def of(cls, argv: tuple[str, ...], command: tuple[str, ...], environ: Mapping[str, str], cwd: Path) -> "Invocation":
        """The invocation that the process's argv, environment and working directory make."""
        return cls(argv, command, environ, cwd, UserFolders.from_environment(environ))

    @property
    def transport(self) -> "LocalTransport":
        """Hands on this machine."""
        from llmctl.transport import LocalTransport

        return LocalTransport(self.environment)

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
        root = expand_home(self.environment.get("LLMCTL_RUNS_ROOT") or profile.runs_root, self.folders)
        return profile.model_copy(update={"runs_root": os.path.normpath(self.cwd / root)})

    def cluster(self, flag: str | None) -> tuple[str, str]:
        """Name of the cluster meant, and where the name came from: --cluster, LLMCTL_CLUSTER, config.yaml, local.

        Raises:
            ProfileError: the user's config file cannot be used.
        """
        if flag is not None:
            return flag, "--cluster"
        if self.environment.get("LLMCTL_CLUSTER"):
            return self.environment["LLMCTL_CLUSTER"], "LLMCTL_CLUSTER"
        path = self.folders.config_file
        if path.is_file():
            from llmctl.profile import read_layer

            values = read_layer(path)
            unknown = next((key for key in values if key != "cluster"), None)
            if unknown is not None:
                raise ProfileError(f"{path}: {unknown}: unknown key; the one there is is cluster")
            if "cluster" in values:
                return str(values["cluster"]), f"{path}: cluster"
        return "local", "the default cluster"
