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

from llmctl.processes import RUN_VARIABLES, ProcessIdentity, boot_id, identify

_TERM_WAIT_S = 1.0


@dataclass(frozen=True)
class CommandOutput:
    """What a command left: exit status (-N for signal N; None: ended by us, its time was over) and what it printed."""

    exit_status: int | None
    stdout: bytes = b""
    stderr: bytes = b""


def run_command(
    argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: str | None = None, stdin: bytes = b""
) -> CommandOutput:
    """Run a command to its end, in a session of its own: no terminal, and nothing of it is left when its time is over.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        list(argv),
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
