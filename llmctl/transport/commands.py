"""Start commands on a machine, as submitting and querying a scheduler need. Standard library only, Python 3.7.

Like file_reads, these functions also run on the login node, at the far end of a connection.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llmctl.transport.processes import RUN_VARIABLES, ProcessIdentity, boot_id, identify

_TERM_WAIT_S = 1.0


@dataclass(frozen=True)
class CommandOutput:
    """Exit status of a command and its output.

    Attributes:
        exit_status: -N for signal N; None if llmctl ended the command at its time limit.
        stdout: standard output.
        stderr: standard error.
    """

    exit_status: int | None
    stdout: bytes = b""
    stderr: bytes = b""


class RunningCommands:
    """The commands that run now, started by ``run_command``. ``end`` may be called from any thread."""

    def __init__(self) -> None:
        """No command runs yet."""
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_open = True

    @contextmanager
    def holding(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Count a command as running. After ``end``, end the command."""
        with self._lock:
            self._processes.add(process)
            is_open = self._is_open
        try:
            if not is_open:
                _signal_group(process)
            yield
        finally:
            with self._lock:
                self._processes.discard(process)

    def end(self) -> None:
        """End all of these commands, and each that starts later."""
        with self._lock:
            self._is_open = False
            processes = [*self._processes]
        for process in processes:
            _signal_group(process)


RUNNING: ContextVar[RunningCommands | None] = ContextVar("RUNNING", default=None)
"""The list in which a program that may end before its calls finds their commands. None: there is no list."""


def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    cwd: str | None = None,
    stdin: bytes = b"",
    executable: str | None = None,
) -> CommandOutput:
    """Run a command to its end, in a new session without a terminal.

    At the time limit every process of the session is ended.

    Args:
        argv: the command.
        env: all its variables.
        timeout_s: time limit in seconds.
        cwd: working directory; None: ours.
        stdin: its input.
        executable: the program, if ``argv[0]`` does not name the program.

    Raises:
        OSError: the command cannot be started.
    """
    process = subprocess.Popen(
        list(argv),
        executable=executable,
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    running = RUNNING.get()
    try:
        with running.holding(process) if running is not None else nullcontext():
            stdout, stderr = process.communicate(stdin or None, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end_group(process)
        return CommandOutput(None)
    except BaseException:
        _end_group(process)
        raise
    return CommandOutput(process.returncode, stdout, stderr)


def run_on_terminal(argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None) -> int:
    """Run a command on our own terminal and return its exit status, 128 + N when signal N ended it.

    The command shares our foreground group and handles the terminal's signals (Ctrl-C and the like) itself. SIGTERM
    and SIGHUP, which may reach us alone, are forwarded to the command.

    Raises:
        OSError: the command cannot be started.
    """
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(sent: int, _frame: object) -> None:
        if started:
            started[0].send_signal(sent)
        else:
            early.append(sent)

    # Handlers, not SIG_IGN: a handler is reset when the command is executed, an ignored signal stays ignored.
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGQUIT):
            before[number] = signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, forward)
        process = subprocess.Popen(list(argv), env=dict(env), cwd=cwd)
        started.append(process)
        for early_signal in early:
            process.send_signal(early_signal)
        status = process.wait()
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
    return status if status >= 0 else 128 - status


def start_detached(argv: Sequence[str], *, env: Mapping[str, str], cwd: str, log: str) -> ProcessIdentity:
    """Start a command that outlives us: own session, no input, output appended to ``log``.

    If llmctl itself was called from within a run, the command does not inherit that run's variables. Otherwise ending
    that run would end this command too.

    Raises:
        OSError: the command cannot be started.
    """
    with open(log, "ab") as output:  # noqa: PTH123 (a path of whatever type, also on Python 3.7)
        process = subprocess.Popen(
            list(argv),
            env={name: env[name] for name in env.keys() - RUN_VARIABLES},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    identity = identify(process.pid) or ProcessIdentity(process.pid, None, boot_id())
    # We are the parent while we live. Without this wait an ended command would stay a zombie and keep its pid.
    threading.Thread(target=process.wait, daemon=True).start()
    return identity


def _end_group(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    """Ask all processes of a command's session to end; kill them if the first has not ended in a second."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_WAIT_S)
        os.killpg(process.pid, signal.SIGKILL)
