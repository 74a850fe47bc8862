"""The only place that starts processes. Pure parts decide what is run; this runs it and says what came of it."""

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl import file_reads, processes
from llmctl.errors import SchedulerError
from llmctl.processes import ProcessIdentity

_STDERR_TAIL = 2000


@dataclass(frozen=True)
class CommandResult:
    """What a finished command left: its exit status and what it printed."""

    exit_status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class LocalTransport:
    """Hands on this machine.

    Attributes:
        environment: variables of the processes it starts. A detached job does not get the variables of the run that
            llmctl itself may have been called from, or ending that run would end this one.
    """

    environment: Mapping[str, str]

    read_parts = staticmethod(file_reads.read_parts)
    list_names = staticmethod(file_reads.list_names)
    inspect_processes = staticmethod(processes.inspect)
    processes_of_run = staticmethod(processes.processes_of_run)
    end_run = staticmethod(processes.end_run)

    def run(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """Run a command to its end, without input; any exit status is an answer.

        Raises:
            SchedulerError: it cannot be started, or is not done after ``timeout_s`` seconds and was ended.
        """
        try:
            done = subprocess.run(
                argv,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SchedulerError(
                f"{argv[0]}: no answer within {timeout_s:g} s", transient=True, argv=argv, stderr_tail=""
            ) from None
        except OSError as error:
            raise SchedulerError(
                f"{argv[0]}: cannot be started: {error.strerror}", transient=False, argv=argv
            ) from None
        return CommandResult(done.returncode, done.stdout, done.stderr[-_STDERR_TAIL:])

    def run_interactive(self, argv: Sequence[str], *, cwd: Path) -> int:
        """Run a command on our own terminal and return its exit status, 128 + N when signal N ended it.

        What the terminal sends (Ctrl-C and the like) is the command's to answer, which shares our foreground group; a
        request to end that reaches us alone is handed on.

        Raises:
            SchedulerError: it cannot be started.
        """
        started: list[subprocess.Popen[bytes]] = []
        early: list[int] = []

        def hand_on(sent: int, _frame: object) -> None:
            if started:
                started[0].send_signal(sent)
            else:
                early.append(sent)

        # Handlers, not SIG_IGN: a handler is reset when the command is executed, an ignored signal stays ignored.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT)}
        before |= {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            process = subprocess.Popen(argv, env=dict(self.environment), cwd=cwd)
            started.append(process)
            for number in early:
                process.send_signal(number)
            status = process.wait()
        except OSError as error:
            raise SchedulerError(
                f"{argv[0]}: cannot be started: {error.strerror}", transient=False, argv=argv
            ) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return status if status >= 0 else 128 - status

    def start_detached(self, argv: Sequence[str], *, cwd: Path, log: Path) -> ProcessIdentity:
        """Start a command that outlives us and the terminal: own session, no input, output appended to ``log``.

        Raises:
            SchedulerError: it cannot be started.
        """
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    argv,
                    env={name: self.environment[name] for name in self.environment.keys() - processes.RUN_VARIABLES},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise SchedulerError(
                f"{argv[0]}: cannot be started: {error.strerror}", transient=False, argv=argv
            ) from None
        identity = processes.identify(process.pid) or ProcessIdentity(process.pid, None, processes.boot_id())
        # While we live we are its parent: without this it would stay a zombie, and its pid taken, until we leave.
        threading.Thread(target=process.wait, daemon=True).start()
        return identity
