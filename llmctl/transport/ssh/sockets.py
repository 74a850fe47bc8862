"""Byte streams for ssh connections: TCP that detects a cut cable, and commands that connect for us."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from llmctl.transport.local import start_error
from llmctl.transport.ssh.failures import unreachable
from llmctl.transport.ssh.ssh_config import SshConfig

CONNECT_TIMEOUT_S = 10.0
_UNACKNOWLEDGED_MS = 15000
_KEEPALIVE_S = 5


def connect_tcp(config: SshConfig) -> socket.socket:
    """Open a TCP connection to a host's ssh port.

    The connection ends if the host does not acknowledge data for 15 s (TCP_USER_TIMEOUT, tcp(7)). Without this limit a
    connection whose cable was cut looks alive for a quarter of an hour or more.

    Raises:
        SchedulerError: the port cannot be reached.
    """
    patience = config.connect_timeout_s or CONNECT_TIMEOUT_S
    deadline = time.monotonic() + patience
    failure: OSError = TimeoutError()
    try:
        places = socket.getaddrinfo(config.hostname, config.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise unreachable(config.name, config.hostname, config.port, error, patience) from None
    for family, kind, protocol, _, address in places:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            for level, option, value in _options():
                connection.setsockopt(level, option, value)
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
            continue
        return connection
    raise unreachable(config.name, config.hostname, config.port, failure, patience)


class CommandSocket:
    """Socket to the standard input and output of a command: ProxyCommand, or ``ssh -W``.

    Attributes:
        socket: our end.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command.

        Raises:
            SchedulerError: the command cannot be started.
        """
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the socket)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    argv,
                    env=dict(environment),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._stderr,
                    start_new_session=True,
                )
        except OSError as error:
            self.socket.close()
            self._stderr.close()
            raise start_error(argv, error) from None

    def stderr_tail(self) -> str:
        """Last line of the command's standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """End the command."""
        self.socket.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
        self._stderr.close()


def _options() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    # Not every system has all of these options; macOS lacks most.
    for name, value in (
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
