"""Transport on another machine: an agent (see agent_program) runs the same functions there, over one connection."""

import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from llmctl.errors import SchedulerError
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.file_writes import FileWrite, PathFacts
from llmctl.transport.local import command_result, lock_file, start_error
from llmctl.transport.processes import ProcessIdentity, ProcessReport
from llmctl.transport.protocol import CommandResult, program_of
from llmctl.transport.ssh.agent import AgentClient
from llmctl.transport.ssh.connection import Connection
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.program import session_command
from llmctl.transport.ssh.route import Route

FIRST_TIMEOUT_S = 10.0
"""Seconds of attempts for the first connection, as long as its error is transient."""
RECONNECT_TIMEOUT_S = 120.0
"""Seconds of attempts for a reconnection after a loss."""
_READ_AT_ONCE = 1 << 26
_CHUNK = 1 << 22
_CLOSE_TIMEOUT_S = 2.0
_PRINT = 'for name do printf "%s\\0" "$(printenv "$name")"; done'
"""Prints the exported variables that are its arguments."""
_PRINT_TIMEOUT_S = 20.0
_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0)


class RemoteTransport:
    """Transport on a host that is reached by ssh (see llmctl.transport.protocol). The first call connects.

    If the connection is lost, a call that only reads is repeated once on a new connection, with a warning. A call that
    changes something is never repeated here: its caller knows how to find out whether the change was made.

    Attributes:
        host: name of the host for the ssh command.
    """

    is_remote = True

    def __init__(
        self,
        route: Route,
        *,
        python: str | None = None,
        warning: Callable[[str], None] | None = None,
        first_patience_s: float = FIRST_TIMEOUT_S,
        reconnect_patience_s: float = RECONNECT_TIMEOUT_S,
    ) -> None:
        """Store the route; the first call connects.

        Args:
            route: route to the host.
            python: Python 3.7 or later on the host. Unset: the first found on the host.
            warning: called with each warning. Unset: prints a line on standard error.
            first_patience_s: see FIRST_TIMEOUT_S.
            reconnect_patience_s: see RECONNECT_TIMEOUT_S.
        """
        self.host = route.host
        self._route = route
        self._python = python
        self._warning = warning or _say
        self._patience = (first_patience_s, reconnect_patience_s)
        self._connection: Connection | None = None
        self._agent: AgentClient | None = None
        self._was_connected = False
        self._locks: set[str] = set()
        self._lock_was_lost = False
        self._guard = threading.RLock()

    def home(self) -> str:
        """The user's home directory on the host."""
        with self._guard:
            return self._ready().home

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """Values of these variables in a login shell of the host, without those that are unset or empty.

        Raises:
            SchedulerError: the host does not answer.
        """
        found = self.run(["sh", "-c", _PRINT, "sh", *names], timeout_s=_PRINT_TIMEOUT_S, only_reads=True).stdout
        values = found.split("\0")[: len(names)]
        return {name: value for name, value in zip(names, values, strict=False) if value}

    def now(self) -> float:
        """Time by the host's clock, in seconds since 1970; no round trip once connected."""
        with self._guard:
            return (self._agent or self._ready()).now()

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
        """Run a command to its end, in the environment of a login shell; any exit status is an answer.

        Raises:
            SchedulerError: the command cannot be started or was ended at its time limit, or the connection was lost.
        """
        try:
            if only_reads:
                done = self._look("run", argv, timeout_s, cwd, dict(env or {}), stdin)
            else:
                done = self._call("run", argv, timeout_s, cwd, dict(env or {}), stdin, argv=argv)
        except OSError as error:
            raise start_error(argv, error) from None
        return command_result(argv, done, timeout_s)

    def run_interactive(self, argv: Sequence[str], *, cwd: str | None = None) -> int:
        """Run a command on our own terminal and return its exit status, 128 + N when signal N ended it.

        Raises:
            ConnectionLost: the connection was lost before the command ended.
        """
        with self._guard:
            agent = self._ready()
            assert self._connection is not None
            connection = self._connection
        return connection.run_interactive(session_command(agent.python, argv, cwd))

    def start_detached(self, argv: Sequence[str], *, cwd: str, log: str) -> ProcessIdentity:
        """Start a command that outlives us and the connection.

        Raises:
            SchedulerError: the command cannot be started, or the connection was lost.
        """
        try:
            identity: ProcessIdentity = self._call("start_detached", argv, cwd, log, argv=argv)
        except OSError as error:
            raise start_error(argv, error) from None
        return identity

    def read_parts(self, reads: Sequence[FileRead]) -> list[FilePart | None]:
        """See file_reads; one round trip for each 64 MiB requested."""
        parts: list[FilePart | None] = []
        for batch in _batches(reads):
            parts += self._look("read_parts", batch)
        return parts

    def list_names(self, directories: Sequence[str]) -> list[list[str]]:
        """See file_reads."""
        names: list[list[str]] = self._look("list_names", list(directories))
        return names

    def stat_paths(self, paths: Sequence[str]) -> list[PathFacts]:
        """See file_writes."""
        facts: list[PathFacts] = self._look("stat_paths", list(paths))
        return facts

    def write_files(self, files: Sequence[FileWrite]) -> None:
        """See file_writes."""
        self._call("write_files", list(files))

    def make_folder(self, path: str, *, mode: int = 0o777, exclusive: bool = False) -> None:
        """See file_writes."""
        self._call("make_folder", path, mode=mode, exclusive=exclusive)

    def make_own_folder(self, runs_root: str, name: str | None = None) -> tuple[str, str]:
        """See file_writes."""
        made, note = self._call("make_own_folder", runs_root, name)
        return made, note

    def why_distrusted(self, run_dir: str, contents: tuple[int, str] | None = None) -> str:
        """See llmctl.supervisor.trust."""
        reason: str = self._look("why_distrusted", run_dir, contents)
        return reason

    def read_bad_nodes(self, runs_root: str) -> Mapping[str, Any]:
        """See llmctl.supervisor.bad_nodes.entries."""
        found: Mapping[str, Any] = self._look("read_bad_nodes", runs_root)
        return found

    def remove(self, paths: Sequence[str]) -> None:
        """See file_writes."""
        self._call("remove", list(paths))

    def link(self, links: Mapping[str, str]) -> None:
        """See file_writes."""
        self._call("link", dict(links))

    def put_tree(self, folder: str, files: Mapping[str, Path]) -> None:
        """Make ``folder`` from local files, all or nothing; an existing folder stays unchanged, and nothing is sent.

        The files are sent as one archive, by SFTP if the host has it.
        """
        place: str | None = self._call("archive_for", folder)
        if place is None:
            return
        with tempfile.TemporaryFile() as archive:
            _pack(archive, files)
            try:
                if not self._send_by_sftp(place, archive):
                    self._send_by_agent(place, archive)
                self._call("unpack", place, folder)
            except BaseException:
                with suppress(SchedulerError, OSError):
                    self._call("remove", [place])
                raise

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold a lock file on the host; the lock is released when the agent ends in any way.

        Raises:
            RecordError: another llmctl holds the lock.
        """
        return self._held(path)

    def inspect_processes(self, identities: Sequence[ProcessIdentity]) -> ProcessReport:
        """See processes.inspect."""
        report: ProcessReport = self._look("inspect_processes", list(identities))
        return report

    def processes_of_run(self, run_dir: str, leaders: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
        """See processes."""
        found: list[ProcessIdentity] = self._look("processes_of_run", run_dir, list(leaders))
        return found

    def end_run(self, run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
        """See processes."""
        left: list[ProcessIdentity] = self._call("end_run", run_dir, list(leaders), grace_s=grace_s)
        return left

    def close(self) -> None:
        """End the agent and the connection; the next call connects again."""
        self._route.give_up_asking()
        # Another thread may be waiting for a password. Then there is no connection to close yet.
        if not self._guard.acquire(timeout=_CLOSE_TIMEOUT_S):
            return
        try:
            agent, connection = self._agent, self._connection
            self._agent = self._connection = None
            if agent is not None:
                agent.close()
            if connection is not None:
                connection.close()
        finally:
            self._guard.release()

    def _look(self, act: str, *args: Any) -> Any:
        with self._guard:
            try:
                return self._ready().call(act, *args)
            except ConnectionLost:
                return self._ready(was_lost=True).call(act, *args)

    def _call(self, act: str, *args: Any, argv: Sequence[str] = (), **options: Any) -> Any:
        with self._guard:
            agent = self._ready()
            if self._lock_was_lost:
                raise ConnectionLost(f"{self.host}: the connection was lost, and with it the lock on the run")
            try:
                return agent.call(act, *args, **options)
            except ConnectionLost:
                what = f"`{program_of(argv)}` ran" if argv else f"{act.replace('_', ' ')} ran"
                raise ConnectionLost(
                    f"{self.host}: connection lost while {what}; the outcome is unknown", argv=argv
                ) from None

    def _ready(self, *, was_lost: bool = False) -> AgentClient:
        """The agent, started if needed; on a new connection after a loss."""
        if self._agent is not None and self._agent.is_open and not was_lost:
            return self._agent
        began = time.monotonic()
        if self._was_connected and self._agent is not None:
            self._lock_was_lost = bool(self._locks)
            self._warning(f"connection to {self.host} lost; reconnecting")
            self.close()
            self._agent = self._start(self._patience[1])
            self._warning(f"reconnected to {self.host} after {time.monotonic() - began:.0f} s")
        else:
            self._agent = self._start(self._patience[0])
            self._was_connected = True
        return self._agent

    def _start(self, patience_s: float) -> AgentClient:
        deadline = time.monotonic() + patience_s
        for delay in (*_DELAYS_S, *[_DELAYS_S[-1]] * round(patience_s / _DELAYS_S[-1])):
            try:
                return self._start_once()
            except SchedulerError as error:
                if not error.transient or not self._route.may_try_again(error) or time.monotonic() + delay > deadline:
                    raise
            time.sleep(delay)
        return self._start_once()

    def _start_once(self) -> AgentClient:
        connection = self._route.open()
        try:
            agent = AgentClient.start(connection, self.host, self._python)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return agent

    @contextmanager
    def _held(self, path: str) -> Iterator[None]:
        def take(place: str) -> int:
            lock: int = self._call("take_lock", place)
            self._locks.add(place)
            return lock

        def release(lock: int) -> None:
            self._locks.discard(path)
            was_lost, self._lock_was_lost = self._lock_was_lost, self._lock_was_lost and bool(self._locks)
            if not was_lost and self._agent is not None and self._agent.is_open:
                with suppress(SchedulerError):
                    self._call("release_lock", lock)

        with lock_file(path, take, release):
            yield

    def _send_by_sftp(self, place: str, archive: IO[bytes]) -> bool:
        """True if the archive has arrived; False if SFTP is refused, or shows other folders than a command sees."""
        with self._guard:
            self._ready()
            assert self._connection is not None
            connection = self._connection
        archive.seek(0)
        try:
            connection.send_file(archive, place)
        except ConnectionLost:
            raise
        except SchedulerError:
            return False
        (facts,) = self.stat_paths([place])
        return facts.kind == "file" and self.read_parts([FileRead(place, 0, 0)])[0] == FilePart(b"", 0, archive.tell())

    def _send_by_agent(self, place: str, archive: IO[bytes]) -> None:
        self._call("remove", [place])
        archive.seek(0)
        while data := archive.read(_CHUNK):
            self._call("append", place, data)


def _pack(archive: IO[bytes], files: Mapping[str, Path]) -> None:
    # gzip 3: code shrinks to a quarter at 60 MB/s.
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=3) as tar:
        for name, path in files.items():
            with path.open("rb") as file:
                tar.addfile(tar.gettarinfo(arcname=name, fileobj=file), file)


def _batches(reads: Sequence[FileRead]) -> Iterator[list[FileRead]]:
    batch: list[FileRead] = []
    size = 0
    for read in reads:
        if batch and size + read.limit > _READ_AT_ONCE:
            yield batch
            batch, size = [], 0
        limit = min(read.limit, _READ_AT_ONCE)
        batch.append(replace(read, limit=limit))
        size += limit
    if batch:
        yield batch


def _say(text: str) -> None:
    print(f"llmctl: {text}", file=sys.stderr, flush=True)
