"""Interface of both kinds of connection: run a command on the host, and send files."""

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Protocol

from llmctl.transport.local import start_error
from llmctl.transport.ssh.failures import told_as_lost

_CLIENT_FAILED = 255
"""Exit status of the ssh client for its own errors; ssh(1). A command with this status counts as a loss."""
STATUS_TIMEOUT_S = 5.0
"""Seconds for the exit status of a command whose output has ended."""
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
        """Read from the command's standard output: b"" at its end, None after ``timeout_s`` without data.

        Raises:
            ConnectionLost: the connection was lost.
        """

    @property
    def is_open(self) -> bool:
        """True if the command still runs, as far as this side knows. No round trip."""

    def exit_status(self) -> int | None:
        """Exit status, after the end of the output; None if a signal ended the command, or the connection was lost."""

    def stderr_tail(self) -> str:
        """End of the command's standard error."""

    def close(self) -> None:
        """Close the command's standard input, and drop the channel. Raises nothing."""


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

    def send_file(self, file: IO[bytes], place: str) -> None:
        """Send a file from its present position to the host, by SFTP.

        Raises:
            ConnectionLost: the connection was lost before the file was sent.
            SchedulerError: the host has no SFTP server, or does not accept the file.
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
        """Start the process.

        Raises:
            SchedulerError: the process cannot be started.
        """
        self._host = host
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the channel)
        # A session of its own: llmctl handles Ctrl-C itself, and ssh finds no terminal on which to ask.
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise start_error(argv, error) from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)

    def write(self, data: bytes) -> None:
        """Send data to the command's standard input.

        Raises:
            ConnectionLost: the host no longer accepts data.
        """
        rest = memoryview(data)
        with told_as_lost(self._host):
            while rest:
                if not select.select([], [self._input], [], SEND_TIMEOUT_S)[1]:
                    raise TimeoutError
                rest = rest[os.write(self._input, rest) :]

    def read(self, timeout_s: float, limit: int = 1 << 18) -> bytes | None:
        """Read from the command's standard output: b"" at its end, None after ``timeout_s`` without data.

        Raises:
            ConnectionLost: the channel has been closed.
        """
        with told_as_lost(self._host):
            if not select.select([self._output], [], [], timeout_s)[0]:
                return None
            return os.read(self._output, limit)

    @property
    def is_open(self) -> bool:
        """True if the process lives."""
        return self._process.poll() is None

    def exit_status(self) -> int | None:
        """Exit status, after the end of the output; None if a signal ended the command, or the connection was lost."""
        try:
            status = self._process.wait(STATUS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        return status if 0 <= status < _CLIENT_FAILED else None

    def stderr_tail(self) -> str:
        """End of the command's standard error; empty once the channel is closed."""
        with suppress(OSError, ValueError):
            self._stderr.seek(0)
            return self._stderr.read().decode("utf-8", errors="replace")[-2000:].strip()
        return ""

    def close(self) -> None:
        """Close the process's standard input, wait a second for its end, then kill it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # The numbers may soon belong to other files; a negative one is refused.
        self._input = self._output = -1
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
