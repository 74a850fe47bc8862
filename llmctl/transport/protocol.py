"""Transport: files, commands and processes of one machine, in as few round trips as possible.

``local.LocalTransport`` acts on this machine; ``ssh.transport.RemoteTransport`` sends the same requests to the same
functions (file_reads, file_writes, processes) at the other end of one ssh connection.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.file_writes import FileWrite, PathFacts
from llmctl.transport.processes import ProcessIdentity, ProcessReport


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command; of standard error only the end."""

    exit_status: int
    stdout: str
    stderr: str


def program_of(argv: Sequence[str]) -> str:
    """Program that a command runs: ``squeue`` for ``sh -c TEXT squeue ...``."""
    return argv[3] if len(argv) > 3 and tuple(argv[:2]) == ("sh", "-c") else argv[0]


class Transport(Protocol):
    """File system, processes and commands of one machine. Paths are that machine's, absolute.

    File operations raise OSError with errno, file name and strerror, as on this machine. Every call may raise
    SchedulerError (transient) if the machine is remote and the connection is lost.
    """

    @property
    def host(self) -> str:
        """Name of the machine for messages: ``this machine``, or its name for ssh."""

    @property
    def is_remote(self) -> bool:
        """True if the machine is reached over the network."""

    def home(self) -> str:
        """The user's home directory on that machine."""

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """Values of these variables in a login shell of that machine, without those that are unset or empty."""

    def now(self) -> float:
        """Time by that machine's clock, in seconds since 1970; its files carry times of this clock."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        only_reads: bool = False,
    ) -> CommandResult:
        """Run a command to its end; any exit status is an answer.

        Args:
            argv: the command.
            timeout_s: time limit in seconds, at which the command is ended.
            cwd: working directory; None: the home directory of a remote machine, our own working directory on this one.
            env: variables laid over the machine's own. Never on a command line.
            stdin: its input.
            only_reads: True if the command changes nothing; it is then repeated once if the connection is lost.

        Raises:
            SchedulerError: the command cannot be started or was ended at its time limit, or the connection was lost.
        """

    def run_interactive(self, argv: Sequence[str], *, cwd: str | None = None) -> int:
        """Run a command on our own terminal and return its exit status, 128 + N when signal N ended it."""

    def start_detached(self, argv: Sequence[str], *, cwd: str, log: str) -> ProcessIdentity:
        """Start a command that outlives us and the connection: own session, no input, output appended to ``log``."""

    def read_parts(self, reads: Sequence[FileRead]) -> list[FilePart | None]:
        """See file_reads."""

    def list_names(self, directories: Sequence[str]) -> list[list[str]]:
        """See file_reads."""

    def stat_paths(self, paths: Sequence[str]) -> list[PathFacts]:
        """See file_writes."""

    def write_files(self, files: Sequence[FileWrite]) -> None:
        """See file_writes: each file atomically."""

    def make_folder(self, path: str, *, mode: int = 0o777, exclusive: bool = False) -> None:
        """See file_writes."""

    def make_own_folder(self, runs_root: str, name: str | None = None) -> tuple[str, str]:
        """See file_writes: the folder beside the runs that only this user can write to; its name, and a note."""

    def why_distrusted(self, run_dir: str, contents: tuple[int, str] | None = None) -> str:
        """See llmctl.supervisor.trust."""

    def read_bad_nodes(self, runs_root: str) -> Mapping[str, Any]:
        """See llmctl.supervisor.bad_nodes.entries: the user's list of bad nodes beside the runs."""

    def remove(self, paths: Sequence[str]) -> None:
        """See file_writes."""

    def put_tree(self, folder: str, files: Mapping[str, Path]) -> None:
        """Make ``folder`` from local files (name below ``folder`` -> local path), all or nothing.

        Sent as one archive; an existing folder stays unchanged.
        """

    def link(self, links: Mapping[str, str]) -> None:
        """See file_writes: symbolic links, path -> target."""

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold a lock file on that machine.

        Raises:
            RecordError: another llmctl holds the lock.
        """

    def inspect_processes(self, identities: Sequence[ProcessIdentity]) -> ProcessReport:
        """See processes.inspect."""

    def processes_of_run(self, run_dir: str, leaders: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
        """See processes."""

    def end_run(self, run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
        """See processes."""

    def close(self) -> None:
        """Close the connection; the next call connects again."""


def transport_for(transport: Transport, hosts: Sequence[str]) -> Transport:
    """Transport on the machines of a job: these hosts of a host group, otherwise the transport itself.

    Args:
        transport: to the cluster.
        hosts: machines of the job; empty: unknown, or chosen by a scheduler.
    """
    only: Callable[[Sequence[str]], Transport] | None = getattr(transport, "only", None)
    return only(hosts) if only is not None else transport
