"""Interface of both kinds of connection: run a command on the host, and send files."""

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from llmctl.transport.ssh.failures import ConnectionLost

if TYPE_CHECKING:
    import paramiko

SEND_TIMEOUT_S = 25.0
"""Seconds without any sent data accepted after which the connection counts as lost."""


class Channel(Protocol):
    """A command that runs on the host."""

    def write(self, data: bytes) -> None:
        """Send data to the command's standard input.

        Raises:
            ConnectionLost: the host no longer accepts data.
        """

    def read(self, timeout_s: float) -> bytes | None:
        """Read from the command's standard output: b"" at its end, None after ``timeout_s`` without data."""

    @property
    def is_open(self) -> bool:
        """True if the command still runs, as far as this side knows. No round trip."""

    def stderr_tail(self) -> str:
        """End of the command's standard error."""

    def close(self) -> None:
        """Close the command's standard input, and drop the channel."""


class Connection(Protocol):
    """An authenticated connection to a host."""

    @property
    def is_open(self) -> bool:
        """True if the connection is open, as far as this side knows. No round trip."""

    def start(self, command: str) -> Channel:
        """Run a command line in the user's login shell.

        Raises:
            SchedulerError: the host refuses.
        """

    def sftp(self) -> "paramiko.SFTPClient":
        """Open a client of the host's SFTP server; the caller closes the client.

        Raises:
            SchedulerError: the host has no SFTP server.
        """

    def run_interactive(self, command: str) -> int:
        """Run a command line on our own terminal; return its exit status.

        Raises:
            ConnectionLost: the connection was lost before the command ended.
        """

    def close(self) -> None:
        """End the connection, and all commands that run over it."""


class ProcessChannel:
    """Channel to a process on this machine: an ssh client, or in tests a shell."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], host: str) -> None:
        self._host = host
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the channel)
        # A session of its own: llmctl handles Ctrl-C itself, and ssh finds no terminal on which to ask.
        self._process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)

    def write(self, data: bytes) -> None:
        """Send data to the command's standard input.

        Raises:
            ConnectionLost: the host no longer accepts data.
        """
        rest = memoryview(data)
        try:
            while rest:
                if not select.select([], [self._input], [], SEND_TIMEOUT_S)[1]:
                    raise ConnectionLost(f"{self._host}: connection lost: the host accepts no more data")
                rest = rest[os.write(self._input, rest) :]
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"{self._host}: connection closed: {error}") from None

    def read(self, timeout_s: float, limit: int = 1 << 18) -> bytes | None:
        """Read from the command's standard output: b"" at its end, None after ``timeout_s`` without data."""
        if not select.select([self._output], [], [], timeout_s)[0]:
            return None
        return os.read(self._output, limit)

    @property
    def is_open(self) -> bool:
        """True if the process lives."""
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the process; None while it runs."""
        return self._process.poll()

    def stderr_tail(self) -> str:
        """End of the command's standard error."""
        self._stderr.seek(0)
        return self._stderr.read().decode("utf-8", errors="replace")[-2000:].strip()

    def close(self) -> None:
        """Close the process's standard input, wait a second for its end, then kill it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            self._process.stdout.close()
        self._stderr.close()


def wait_for(channel: Channel, marker: bytes, patience_s: float) -> tuple[bytes, bytes | None]:
    """Read a channel up to ``marker``; return the bytes before and after the marker.

    The second value is None if the channel ended, or the time was over, before the marker came.
    """
    seen = b""
    deadline = time.monotonic() + patience_s
    while marker not in seen:
        data = channel.read(max(0.0, deadline - time.monotonic()))
        if not data:
            return seen, None
        seen += data
    before, _, after = seen.partition(marker)
    return before, after
