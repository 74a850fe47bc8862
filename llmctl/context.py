"""One call of llmctl: the world as the entry point found it. Everything else takes it as an argument."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.errors import ProfileError
from llmctl.paths import UserFolders

if TYPE_CHECKING:
    from llmctl.runs.record import RunIndex
    from llmctl.site.profile import ClusterProfile
    from llmctl.transport.local import LocalTransport
    from llmctl.transport.protocol import Hands


@dataclass(frozen=True)
class Invocation:
    """One call of llmctl: the world as the entry point found it, handed on through typer's ``Context.obj``.

    Attributes:
        argv: as typed, ``llmctl`` first.
        command: what stood after ``--``; empty if nothing did.
        environment: the environment variables; nothing else of llmctl reads it.
        cwd: the working directory, absolute.
        folders: the user's folders.
        connections: hands of the clusters that this call has reached, by name; ``close`` ends them.
    """

    argv: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    folders: UserFolders
    connections: "dict[str, Hands]" = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, argv: tuple[str, ...], command: tuple[str, ...], environ: Mapping[str, str], cwd: Path) -> "Invocation":
        """The invocation that the process's argv, environment and working directory make."""
        return cls(argv, command, environ, cwd, UserFolders.from_environment(environ))

    @property
    def transport(self) -> "LocalTransport":
        """Hands on this machine."""
        from llmctl.transport.local import LocalTransport

        return LocalTransport(self.environment)

    def connect(self, profile: "ClusterProfile") -> "Hands":
        """Hands of a cluster: where its commands are run and its run directories are. Connected when first used.

        Raises:
            ProfileError: the profile names no machine.
        """
        if not is_remote(profile):
            return self.transport
        if profile.name not in self.connections:
            from llmctl.transport.ssh import hands_of

            self.connections[profile.name] = hands_of(profile, self.environment)
        return self.connections[profile.name]

    def close(self) -> None:
        """End the connections that this call has made."""
        while self.connections:
            hands = self.connections.popitem()[1]
            hands.close()

    @property
    def index(self) -> "RunIndex":
        """The index of this user's runs."""
        from llmctl.runs.record import RunIndex

        return RunIndex(self.folders.state)

    def profile(self, name: str, origin: str = "--cluster") -> "ClusterProfile":
        """A cluster's profile; LLMCTL_RUNS_ROOT goes before its runs_root.

        On this machine runs_root comes back absolute; see ``runs_root`` for the others.

        Raises:
            UsageError: ``origin`` is a flag and no cluster has this name.
            ProfileError: the same from elsewhere, or a profile that cannot be used.
        """
        from llmctl.site.profile import expand_home, load_profile

        profile = load_profile(self.folders, name, origin)
        root = self.environment.get("LLMCTL_RUNS_ROOT") or profile.runs_root
        if root is not None and not is_remote(profile):
            root = os.path.normpath(self.cwd / expand_home(root, self.folders))
        return profile.model_copy(update={"runs_root": root})

    def runs_root(self, profile: "ClusterProfile") -> str:
        """The folder of a cluster's run directories, absolute on the cluster's machine.

        ``~`` is the home directory there: that alone asks the machine.

        Raises:
            ProfileError: the profile does not say, or names a path that is not absolute there.
            SchedulerError: the machine cannot be asked.
        """
        root = profile.runs_root
        overlay = self.folders.clusters / f"{profile.name}.yaml"
        if root is None:
            raise ProfileError(
                f"cluster {profile.name} has no runs_root: the folder of the runs, which all nodes see\n"
                f"llmctl clusters setup {profile.name} asks for it; or set LLMCTL_RUNS_ROOT, or runs_root in {overlay}"
            )
        if root == "~" or root.startswith("~/"):
            root = self.connect(profile).home() + root[1:]
        if not root.startswith("/"):
            raise ProfileError(
                f"cluster {profile.name}: runs_root: {root} is not absolute\n"
                f"give a path that begins with / or ~/ in {overlay}, or in LLMCTL_RUNS_ROOT"
            )
        return os.path.normpath(root)

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
            from llmctl.site.profile import read_layer

            values = read_layer(path)
            unknown = next((key for key in values if key != "cluster"), None)
            if unknown is not None:
                raise ProfileError(f"{path}: {unknown}: unknown key; the one there is is cluster")
            if "cluster" in values:
                return str(values["cluster"]), f"{path}: cluster"
        return "local", "the default cluster"


def is_remote(profile: "ClusterProfile") -> bool:
    """Whether a cluster's machines are reached by ssh, rather than being this machine."""
    return profile.scheduler == "ssh" or profile.login.host is not None
