"""The small interface that both kinds of connection have: a command on the other side, and files sent there."""

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

SEND_PATIENCE_S = 25.0
"""How long the other side may take nothing of what is sent before it counts as lost."""


class Channel(Protocol):
    """A command that runs on the other side."""

    def write(self, data: bytes) -> None:
        """Send to its standard input.

        Raises:
            ConnectionLost: nobody takes it.
        """

    def read(self, timeout_s: float) -> bytes | None:
        """What its standard output holds: b"" at the end, None if nothing comes within the time."""

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known here, it still runs. Asks nobody."""

    def stderr_tail(self) -> str:
        """The end of what it has said on standard error."""

    def close(self) -> None:
        """Close its standard input, and forget it."""


class Connection(Protocol):
    """A way to a host that has been authenticated."""

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known here, it still stands. Asks nobody."""

    def start(self, command: str) -> Channel:
        """Have the user's login shell run a command line.

        Raises:
            SchedulerError: the host does not do it.
        """

    def sftp(self) -> "paramiko.SFTPClient":
        """A client of the host's SFTP server; the caller closes it.

        Raises:
            SchedulerError: the host has none.
        """

    def run_interactive(self, command: str) -> int:
        """Run a command line on our own terminal; its exit status.

        Raises:
            ConnectionLost: the connection went before the command ended.
        """

    def close(self) -> None:
        """End it, and all that runs over it."""


class ProcessChannel:
    """A channel that is a process on this machine: an ssh client, or in tests a shell."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], host: str) -> None:
        self._host = host
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the channel)
        # A session of its own: Ctrl-C is ours to handle, and ssh finds no terminal that it could ask on.
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
        """Send to its standard input.

        Raises:
            ConnectionLost: nobody takes it.
        """
        rest = memoryview(data)
        try:
            while rest:
                if not select.select([], [self._input], [], SEND_PATIENCE_S)[1]:
                    raise ConnectionLost(f"{self._host}: takes nothing any more")
                rest = rest[os.write(self._input, rest) :]
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"{self._host}: connection closed: {error}") from None

    def read(self, timeout_s: float, limit: int = 1 << 18) -> bytes | None:
        """What its standard output holds: b"" at the end, None if nothing comes within the time."""
        if not select.select([self._output], [], [], timeout_s)[0]:
            return None
        return os.read(self._output, limit)

    @property
    def is_open(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def stderr_tail(self) -> str:
        """The end of what it has said on standard error."""
        self._stderr.seek(0)
        return self._stderr.read().decode("utf-8", errors="replace")[-2000:].strip()

    def close(self) -> None:
        """Close its standard input, give it a moment to leave, and end it."""
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
    """Read a channel until a line that begins with ``marker``; what came before, and what comes after the marker.

    None in its place: the channel ended, or the time was over.
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
