"""Starting commands: what submitting and asking a scheduler need of a machine. Standard library only, Python 3.7.

Like file_reads, these functions are also run on the other side of a connection.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmctl.transport.processes import RUN_VARIABLES, ProcessIdentity, boot_id, identify

_TERM_WAIT_S = 1.0


@dataclass(frozen=True)
class CommandOutput:
    """What a command left: exit status (-N for signal N; None: ended by us, its time was over) and what it printed."""

    exit_status: int | None
    stdout: bytes = b""
    stderr: bytes = b""


def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    cwd: str | None = None,
    stdin: bytes = b"",
    executable: str | None = None,
) -> CommandOutput:
    """Run a command to its end, in a session of its own: no terminal, and nothing of it is left when its time is over.

    Args:
        argv: what.
        env: all its variables.
        timeout_s: it is ended after that.
        cwd: where; None: here.
        stdin: its input.
        executable: the program, where ``argv[0]`` does not name it.

    Raises:
        OSError: it cannot be started.
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
    try:
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

    What the terminal sends (Ctrl-C and the like) is the command's to answer, which shares our foreground group; a
    request to end that reaches us alone is handed on.

    Raises:
        OSError: it cannot be started.
    """
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def hand_on(sent: int, _frame: object) -> None:
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
            before[number] = signal.signal(number, hand_on)
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

    It does not get the variables of the run that we ourselves may have been called from, or ending that run would end
    this one.

    Raises:
        OSError: it cannot be started.
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
    # While we live we are its parent: without this it would stay a zombie, and its pid taken, until we leave.
    threading.Thread(target=process.wait, daemon=True).start()
    return identity


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_WAIT_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
