"""Transport on this machine. The only place, with llmctl.transport.ssh, that starts processes."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.errors import ProgramMissing, RecordError, SchedulerError
from llmctl.supervisor import trust
from llmctl.supervisor.bad_nodes import entries
from llmctl.transport import file_reads, file_writes, processes
from llmctl.transport.processes import ProcessIdentity
from llmctl.transport.protocol import CommandResult, program_of

if TYPE_CHECKING:
    from llmctl.transport.commands import CommandOutput

_STDERR_TAIL = 2000


@dataclass(frozen=True)
class LocalTransport:
    """Transport on this machine (see llmctl.transport.protocol).

    Attributes:
        environment: variables of the processes that this transport starts. If llmctl was called from within a run, a
            detached job does not inherit that run's variables. Otherwise ending that run would end the job too.
    """

    environment: Mapping[str, str]
    host = "this machine"
    is_remote = False

    read_parts = staticmethod(file_reads.read_parts)
    list_names = staticmethod(file_reads.list_names)
    stat_paths = staticmethod(file_writes.stat_paths)
    write_files = staticmethod(file_writes.write_files)
    make_folder = staticmethod(file_writes.make_folder)
    make_own_folder = staticmethod(file_writes.make_own_folder)
    why_distrusted = staticmethod(trust.why_distrusted)
    read_bad_nodes = staticmethod(entries.read_entries)
    remove = staticmethod(file_writes.remove)
    link = staticmethod(file_writes.link)
    inspect_processes = staticmethod(processes.inspect)
    processes_of_run = staticmethod(processes.processes_of_run)
    end_run = staticmethod(processes.end_run)

    def home(self) -> str:
        """The user's home directory."""
        return self.environment.get("HOME") or file_writes.home()

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """Values of these variables here, without those that are unset or empty."""
        return {name: self.environment[name] for name in names if self.environment.get(name)}

    def now(self) -> float:
        """Time by this machine's clock, in seconds since 1970."""
        return time.time()

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

        Raises:
            SchedulerError: the command cannot be started, or was ended after ``timeout_s`` seconds.
        """
        from llmctl.transport.commands import run_command

        del only_reads  # there is no connection
        merged = {**self.environment, **(env or {})}
        try:
            done = run_command(argv, env=merged, timeout_s=timeout_s, cwd=cwd, stdin=stdin)
        except OSError as error:
            raise start_error(argv, error) from None
        return command_result(argv, done, timeout_s)

    def run_interactive(self, argv: Sequence[str], *, cwd: str | None = None) -> int:
        """Run a command on our own terminal and return its exit status, 128 + N when signal N ended it.

        Raises:
            SchedulerError: the command cannot be started.
        """
        from llmctl.transport.commands import run_on_terminal

        try:
            return run_on_terminal(argv, env=self.environment, cwd=cwd)
        except OSError as error:
            raise start_error(argv, error) from None

    def start_detached(self, argv: Sequence[str], *, cwd: str, log: str) -> ProcessIdentity:
        """Start a command that outlives us and the terminal: own session, no input, output appended to ``log``.

        Raises:
            SchedulerError: the command cannot be started.
        """
        from llmctl.transport.commands import start_detached

        try:
            return start_detached(argv, env=self.environment, cwd=cwd, log=log)
        except OSError as error:
            raise start_error(argv, error) from None

    def put_tree(self, folder: str, files: Mapping[str, Path]) -> None:
        """Make ``folder`` from local files (name below ``folder`` -> source), all or nothing.

        An existing folder stays unchanged.

        Raises:
            OSError: a file cannot be read or written; nothing is left behind.
        """
        with file_writes.new_folder(folder) as aside:
            for name, path in files.items() if aside is not None else ():
                place = file_writes.place_below(Path(str(aside)), name)
                file_writes.make_parents(str(place.parent))
                shutil.copyfile(path, place)
                place.chmod(path.stat().st_mode & 0o755)

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold a lock file; the kernel releases the lock when this process ends in any way (flock(2)).

        Raises:
            RecordError: another llmctl holds the lock.
        """
        return lock_file(path, file_writes.take_lock, file_writes.release_lock)

    def close(self) -> None:
        """Do nothing: this machine has no connection to close."""


def start_error(argv: Sequence[str], error: OSError) -> SchedulerError:
    """Error for a command that failed to start."""
    # The shell's words for these are "command not found" and "permission denied".
    is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError))
    kind = ProgramMissing if is_missing else SchedulerError
    return kind(f"{program_of(argv)}: cannot be started: {error.strerror}", transient=False, argv=argv)


def command_result(argv: Sequence[str], done: "CommandOutput", timeout_s: float) -> CommandResult:
    """Result as text, with the end of standard error.

    Raises:
        SchedulerError: the command was ended at its time limit.
    """
    if done.exit_status is None:
        raise SchedulerError(f"{program_of(argv)}: no answer within {timeout_s:g} s", transient=True, argv=argv)
    stdout, stderr = (text.decode("utf-8", errors="replace") for text in (done.stdout, done.stderr))
    return CommandResult(done.exit_status, stdout, stderr[-_STDERR_TAIL:])


@contextmanager
def lock_file(path: str, take: Callable[[str], int], release: Callable[[int], None]) -> Iterator[None]:
    """Hold the lock file of a run; ``take`` and ``release`` act on the file's machine (see file_writes).

    Raises:
        RecordError: another llmctl holds the lock, or its folder cannot be written.
    """
    folder = Path(path).parent
    try:
        lock = take(path)
    except BlockingIOError:
        raise RecordError(
            f"{folder.name} is being resumed or cancelled by another llmctl; try again when it is done"
        ) from None
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        release(lock)
