"""Channel of a paramiko connection; every error that paramiko raises for it is a ConnectionLost."""

import math
import time
from contextlib import AbstractContextManager, suppress

import paramiko

from llmctl.transport.ssh.connection import SEND_TIMEOUT_S, STATUS_TIMEOUT_S
from llmctl.transport.ssh.failures import ConnectionLost, told_as_lost

LIBRARY: tuple[type[Exception], ...] = (paramiko.SSHException, paramiko.SFTPError)
"""Base classes of paramiko's own errors; it raises errors of sockets, and EOFError, as well."""
_AT_ONCE = 1 << 18


class ParamikoChannel:
    """A command that runs over a paramiko connection.

    Attributes:
        heard_at: time of the last output, by the monotonic clock; -inf before the first.
    """

    def __init__(self, channel: paramiko.Channel, host: str) -> None:
        self._channel = channel
        self._host = host
        self._stderr = b""
        self.heard_at = -math.inf

    def write(self, data: bytes) -> None:
        """Send data to the command's standard input.

        Raises:
            ConnectionLost: the host no longer accepts data.
        """
        with self._guard():
            self._channel.settimeout(SEND_TIMEOUT_S)
            self._channel.sendall(data)

    def write_some(self, data: bytes) -> int:
        """Send as much as the host accepts at once; return the number of bytes sent.

        Raises:
            ConnectionLost: the command has ended, or the connection.
        """
        with self._guard():
            return self._channel.send(data) if self._channel.send_ready() else 0

    def end_input(self) -> None:
        """Close the command's standard input."""
        with self._guard():
            self._channel.shutdown_write()

    def read(self, timeout_s: float) -> bytes | None:
        """Read from the command's standard output: b"" at its end, None after ``timeout_s`` without data."""
        with self._guard():
            self._channel.settimeout(timeout_s)
            try:
                return self._heard(self._channel.recv(_AT_ONCE))
            except TimeoutError:
                return None

    def read_stderr(self) -> bytes:
        """Standard error that has come; b"" if none has."""
        with self._guard():
            return self._heard(self._channel.recv_stderr(_AT_ONCE)) if self._channel.recv_stderr_ready() else b""

    def fileno(self) -> int:
        """Descriptor that is readable if output has come, or has ended."""
        with self._guard():
            return self._channel.fileno()

    def resize(self, columns: int, rows: int) -> None:
        """Report a new size of the terminal."""
        with self._guard():
            self._channel.resize_pty(columns, rows)

    @property
    def is_open(self) -> bool:
        """True if the command still runs, as far as this side knows."""
        transport = self._channel.get_transport()
        return not self._channel.closed and not self._channel.eof_received and transport.is_active()

    @property
    def was_cut(self) -> bool:
        """True if the channel was closed without the end of its output, as when the connection below was lost."""
        return self._channel.closed and not self._channel.eof_received

    def exit_status(self) -> int | None:
        """Exit status, after the end of the output; None if a signal ended the command, or the connection was lost."""
        self._channel.status_event.wait(STATUS_TIMEOUT_S)
        # -1 is paramiko's word for both.
        return self._channel.exit_status if self._channel.exit_status >= 0 else None

    def stderr_tail(self) -> str:
        """End of the command's standard error."""
        with suppress(ConnectionLost):
            while data := self.read_stderr():
                self._stderr = (self._stderr + data)[-2000:]
        return self._stderr.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        """Close the channel."""
        for close in (self._channel.shutdown_write, self._channel.close):
            with suppress(ConnectionLost), self._guard():
                close()

    def _heard(self, data: bytes) -> bytes:
        if data:
            self.heard_at = time.monotonic()
        return data

    def _guard(self) -> AbstractContextManager[None]:
        return told_as_lost(self._host, *LIBRARY)
