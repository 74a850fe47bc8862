"""One call of llmctl: folders, environment, connections, messages, clusters in use, place of secrets.

The command line makes one Context; everything else takes it as an argument. Slow modules are imported where they are
used: every command imports this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmctl.errors import ProfileError
from llmctl.paths import UserFolders, expand, working_directory
from llmctl.terminal_text import printable

if TYPE_CHECKING:
    from llmctl.backends.base import Backend, QueueBackend
    from llmctl.job_state import JobState
    from llmctl.runs.index import RunIndex
    from llmctl.runs.job_status import SchedulerWatch
    from llmctl.runs.record import RunRecord
    from llmctl.site.profile import ClusterProfile
    from llmctl.transport.local import LocalTransport
    from llmctl.transport.protocol import Transport

DEFAULT_CLUSTER = "local"
"""The cluster of users who name no cluster. Its profile comes with llmctl."""
_USER_KEYS = ("cluster", "notify", "notify_on")


def say(message: str) -> None:
    """Print a message on standard error, without escape sequences. Standard output stays clean for a pipe."""
    sys.stdout.flush()  # in a file that both streams go to, the message follows what was printed before
    print(printable(message), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Context:
    """One call of llmctl. typer passes the Context on as ``Context.obj``.

    Attributes:
        command: the words after ``--``; empty if there are none.
        environment: the environment variables; the rest of llmctl never reads os.environ.
        cwd: the working directory, absolute.
        folders: the user's folders.
        connections: transports to the remote clusters that this call has used, by name; ``close`` ends them.
        backends: of the schedulers that this call has used, by name.
        tell: shows a message to the user while the call goes on.
        asks: False if new connections must not ask the user for a password, since a screen has the terminal.
        answer: answers these questions in place of the terminal; None without one.
    """

    argv: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    folders: UserFolders
    connections: dict[str, Transport] = field(default_factory=dict, compare=False, repr=False)
    backends: dict[str, Backend] = field(default_factory=dict, compare=False, repr=False)
    tell: Callable[[str], None] = field(default=say, compare=False, repr=False)
    asks: bool = True
    answer: Callable[[str], str] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, argv: tuple[str, ...], command: tuple[str, ...], environ: Mapping[str, str], cwd: Path | None = None
    ) -> Context:
        """Build the context from the process's argv, environment and working directory; None: look it up."""
        return cls(argv, command, environ, cwd or working_directory(), UserFolders.from_environment(environ))

    @property
    def transport(self) -> LocalTransport:
        """Transport on this machine."""
        from llmctl.transport.local import LocalTransport

        return LocalTransport(self.environment)

    def connect(self, profile: ClusterProfile) -> Transport:
        """Transport to the machine with a cluster's commands and run directories. Connected at first use.

        Raises:
            ProfileError: the profile names no machine.
        """
        if not self._is_remote(profile):
            return self.transport
        if profile.name not in self.connections:
            self.connections[profile.name] = self._open_transport(profile)
        return self.connections[profile.name]

    def _open_transport(self, profile: ClusterProfile) -> Transport:
        from llmctl.transport.ssh import connect, connect_hosts
        from llmctl.transport.ssh.terminal import Answers, Terminal

        login, terminal = profile.login, Terminal() if self.asks else Terminal(path="")
        if self.answer is not None:
            terminal = Answers(self.answer)

        def warn(text: str) -> None:
            self.tell(f"llmctl: {text}")

        if login.host is None or self.backend(profile).capabilities.starts_on_hosts:
            return connect_hosts(profile, self.environment, terminal, warn)
        host, jump = login.host, login.proxy_jump
        return connect(host, self.environment, proxy_jump=jump, python=login.python, terminal=terminal, warning=warn)

    def backend(self, profile: ClusterProfile) -> Backend:
        """The backend of a cluster's scheduler, loaded once per call.

        Raises:
            ProfileError: no backend has this name, or the backend cannot be imported.
        """
        if profile.scheduler not in self.backends:
            from llmctl.backends import load_backend

            self.backends[profile.scheduler] = load_backend(profile.scheduler)
        return self.backends[profile.scheduler]

    def queue_backend(self, profile: ClusterProfile) -> QueueBackend | None:
        """The backend of a scheduler with a queue; None for a scheduler that starts jobs directly.

        Raises:
            ProfileError: see ``backend``.
        """
        backend = self.backend(profile)
        return cast("QueueBackend", backend) if backend.capabilities.has_queue else None

    def _is_remote(self, profile: ClusterProfile) -> bool:
        return profile.login.host is not None or self.backend(profile).capabilities.starts_on_hosts

    def close(self) -> None:
        """Close the connections of this call."""
        while self.connections:
            transport = self.connections.popitem()[1]
            transport.close()

    @property
    def index(self) -> RunIndex:
        """The index of this user's runs."""
        from llmctl.runs.index import RunIndex

        return RunIndex(self.folders.state)

    def profile(self, name: str, origin: str = "--cluster") -> ClusterProfile:
        """Load a cluster's profile. LLMCTL_RUNS_ROOT takes precedence over its runs_root.

        On this machine the returned runs_root is absolute; see ``runs_root`` for remote clusters.

        Raises:
            UsageError: ``origin`` is a flag and no cluster has this name.
            ProfileError: another origin names an unknown cluster, or the profile is invalid.
        """
        from llmctl.site.profile import load_profile

        profile = load_profile(self.folders, name, origin)
        root = self.environment.get("LLMCTL_RUNS_ROOT") or profile.runs_root
        if root is not None and not self._is_remote(profile):
            root = os.path.normpath(self.cwd / self._expanded_root(root, profile, self.transport))
        return profile.model_copy(update={"runs_root": root})

    def runs_root(self, profile: ClusterProfile, *, group: str | None = None, machine: Transport | None = None) -> str:
        """Absolute path of a cluster's folder of run directories, on the cluster's machine.

        Without runs_root it is the profile's work area, else a folder in the home directory. Only a leading ``~``, the
        home directory there, and a variable there need a question to the machine.

        Args:
            profile: of the cluster.
            group: for the work area; None: LLMCTL_GROUP or the profile's.
            machine: the cluster's; None: connect to it.

        Raises:
            ProfileError: runs_root is not an absolute path there, has a variable that is not set there, or the work
                area is not valid.
            SchedulerError: the machine does not answer.
        """
        root = profile.runs_root or self._unset_root(profile, group)
        root = self._expanded_root(root, profile, machine or self.connect(profile))
        if not root.startswith("/"):
            raise ProfileError(
                f"cluster {profile.name}: runs_root: {root} is not absolute\n"
                f"give a path that begins with / or ~/ in {self.folders.clusters / profile.name}.yaml, or in "
                "LLMCTL_RUNS_ROOT"
            )
        return os.path.normpath(root)

    def _expanded_root(self, root: str, profile: ClusterProfile, machine: Transport) -> str:
        try:
            return _expanded(root, machine)
        except ProfileError as error:
            file = self.folders.clusters / f"{profile.name}.yaml"
            where = "LLMCTL_RUNS_ROOT" if self.environment.get("LLMCTL_RUNS_ROOT") else f"{file}: runs_root"
            raise ProfileError(f"{where}: {error.message}") from None

    def _unset_root(self, profile: ClusterProfile, group: str | None) -> str:
        from llmctl.site.unset_values import HOME_FOLDER, work_area
        from llmctl.transport.ssh.ssh_config import user_on

        user = user_on(profile.hosts[0] if profile.hosts else profile.login.host, self.environment)
        group = group or self.environment.get("LLMCTL_GROUP") or profile.group
        return work_area(profile, group=group, user=user) or HOME_FOLDER

    def cluster(self, flag: str | None) -> tuple[str, str]:
        """Name and origin of the chosen cluster: --cluster, LLMCTL_CLUSTER, config.yaml or local.

        Raises:
            ProfileError: the user's config file is invalid.
        """
        if flag is not None:
            return flag, "--cluster"
        if self.environment.get("LLMCTL_CLUSTER"):
            return self.environment["LLMCTL_CLUSTER"], "LLMCTL_CLUSTER"
        values = self.user_settings()
        if "cluster" in values:
            return str(values["cluster"]), f"{self.folders.config_file}: cluster"
        return DEFAULT_CLUSTER, "the default cluster"

    def user_settings(self) -> dict[str, Any]:
        """Values of the user's config file; empty without one.

        Raises:
            ProfileError: the file is invalid.
        """
        path = self.folders.config_file
        if not path.is_file():
            return {}
        from llmctl.site.profile import read_layer

        values = dict(read_layer(path))
        unknown = next((key for key in values if key not in _USER_KEYS), None)
        if unknown is not None:
            raise ProfileError(f"{path}: {unknown}: unknown key; valid keys are {', '.join(_USER_KEYS)}")
        return values


def is_remote(profile: ClusterProfile) -> bool:
    """True if a cluster's machines are reached by ssh; False if the cluster is this machine."""
    from llmctl.backends import capabilities_of

    return profile.login.host is not None or capabilities_of(profile.scheduler).starts_on_hosts


def resolve_profile_paths(profile: ClusterProfile, context: Context) -> ClusterProfile:
    """Replace ``~`` and variables in a profile's paths, and fill in runs_root. Asks the machine only if it is needed.

    Raises:
        ProfileError: runs_root is not absolute, or a variable is not set.
        SchedulerError: the machine does not answer.
    """
    machine = context.connect(profile)
    root = context.runs_root(profile, machine=machine)
    return _with_paths(profile, machine).model_copy(update={"runs_root": root})


def _expanded(path: str, machine: Transport) -> str:
    """See ``expand``: most paths have nothing to replace."""
    return expand(path, machine) if {"~", "$"} & set(path) else path


def _with_paths(profile: ClusterProfile, machine: Transport) -> ClusterProfile:
    """Replace ``~`` and variables in the paths of a profile, apart from runs_root."""

    def at(key: str, path: str | None) -> str | None:
        try:
            return path if path is None else _expanded(path, machine)
        except ProfileError as error:
            raise ProfileError(f"cluster {profile.name}: {key}: {error.message}") from None

    software, container = profile.environment, profile.container
    mounts = (":".join(str(at("container.mounts", part)) for part in mount.split(":")) for mount in container.mounts)
    paths = {name: at(f"environment.{name}", getattr(software, name)) for name in ("path", "python", "module_init")}
    places = {name: at(f"container.{name}", getattr(container, name)) for name in ("image_folder", "save")}
    container = container.model_copy(update={**places, "mounts": tuple(mounts)})
    return profile.model_copy(update={"environment": software.model_copy(update=paths), "container": container})


@dataclass(frozen=True)
class ClusterSession:
    """A cluster in use during one call: profile, transport, scheduler queries.

    Attributes:
        profile: the cluster's profile.
        transport: the machine of its files and commands; connected at first use.
        backend: the scheduler's backend; None where jobs are processes.
    """

    profile: ClusterProfile
    transport: Transport
    backend: QueueBackend | None

    @classmethod
    def of(cls, context: Context, cluster: str, origin: str) -> ClusterSession:
        """Open a session on a cluster.

        Args:
            context: this call of llmctl.
            cluster: the cluster's name.
            origin: source of the name, for messages.

        Raises:
            ProfileError: the cluster has no profile, or an invalid profile.
            UsageError: as above, and ``origin`` is a flag.
        """
        profile = context.profile(cluster, origin)
        return cls(profile, context.connect(profile), context.queue_backend(profile))

    @classmethod
    def for_jobs(cls, context: Context, cluster: str, origin: str, *, asks: bool = True) -> ClusterSession:
        """Open a session for submitting: the paths of its profile have neither ``~`` nor variables.

        A runs_root that is not set waits for the group of the job: ``with_runs_root``.

        Args:
            context: this call of llmctl.
            cluster: the cluster's name.
            origin: source of the name, for messages.
            asks: False for a dry run, which does not contact another machine.

        Raises:
            ProfileError: the cluster has no profile, or an invalid profile.
            UsageError: as above, and ``origin`` is a flag.
            SchedulerError: the machine does not answer the question for the home directory.
        """
        profile = context.profile(cluster, origin)
        if asks or not is_remote(profile):
            transport = context.connect(profile)
        else:
            from llmctl.site.unset_values import HOME
            from llmctl.transport.uncontacted import UncontactedMachine

            host = profile.login.host or next(iter(profile.hosts), profile.name)
            transport = cast("Transport", UncontactedMachine(host, HOME))
        root = None if profile.runs_root is None else context.runs_root(profile, machine=transport)
        profile = _with_paths(profile, transport).model_copy(update={"runs_root": root})
        return cls(profile, transport, context.queue_backend(profile))

    def with_runs_root(self, context: Context, group: str | None) -> ClusterSession:
        """The session with a runs_root, if the profile sets none: the work area of the group, else below the home.

        Raises:
            ProfileError: the work area is not valid.
            SchedulerError: the machine does not answer the question for the home directory.
        """
        root = context.runs_root(self.profile, group=group, machine=self.transport)
        return replace(self, profile=self.profile.model_copy(update={"runs_root": root}))

    def watch(
        self,
        *,
        interval_s: float = 0.0,
        remembered: Mapping[str, tuple[JobState, float]] | None = None,
        asks_again: bool = False,
    ) -> SchedulerWatch | None:
        """Build a SchedulerWatch for job queries; None where jobs are processes."""
        if self.backend is None:
            return None
        from llmctl.runs.job_status import SchedulerWatch

        return SchedulerWatch(
            self.backend, self.transport, interval_s=interval_s, remembered=remembered, asks_again=asks_again
        )

    def remove_secrets(self, context: Context, records: Iterable[RunRecord]) -> None:
        """Remove the secrets of ended runs. Jobs that never ran, or were killed, leave secrets behind.

        Raises:
            SchedulerError: the machine cannot be reached.
        """
        paths = [
            secrets_file(context, self.profile, record.run_dir, submission.number)
            for record in records
            if record.job.get("secrets")
            for submission in record.submissions
        ]
        if paths:
            self.transport.remove(paths)


def secrets_file(context: Context, profile: ClusterProfile, run_dir: Path, submission: int) -> str:
    """Path of one submission's secrets on the cluster's machine. Exists until the job ends.

    On this machine, secrets lie in the user's own state folder. On a cluster, they lie in the user's own folder beside
    the run directories, to which the run has a link. Each host without shared files has such a folder.
    """
    from llmctl.backends import capabilities_of
    from llmctl.supervisor.trust import OWN_FOLDER, SECRETS_FOLDER

    if capabilities_of(profile.scheduler).starts_in_place and not is_remote(profile):
        return f"{context.folders.secrets}/{run_dir.name}.{submission}"
    return f"{run_dir}/{OWN_FOLDER}/{SECRETS_FOLDER}/{run_dir.name}.{submission}"


def secrets_bytes(names: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Encode the secret values in the format that the supervisor reads."""
    return "".join(f"{name}\0{environ[name]}\0" for name in names).encode("utf-8", "surrogateescape")
