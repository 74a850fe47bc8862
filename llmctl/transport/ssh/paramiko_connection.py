"""Connection of our own, made with paramiko: through jump hosts if needed, each of them verified."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import cast

import paramiko

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.authentication import Credentials, Login
from llmctl.transport.ssh.connection import SEND_TIMEOUT_S
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.host_keys import check_host_key, known_keys, preferred_algorithms
from llmctl.transport.ssh.sockets import CONNECT_TIMEOUT_S, CommandSocket, connect_tcp
from llmctl.transport.ssh.ssh_config import SshConfig
from llmctl.transport.ssh.terminal import lend, window_size

_HANDSHAKE_S = 15.0
_KEEPALIVE_S = 5
_SILENCE_S = 20.0
_SESSION_S = 30.0
_WINDOW = 1 << 24
"""Bytes in flight: 16 MiB fill 1 Gbit/s over 130 ms."""

# Exceptions report the errors; without this paramiko would also print tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class ParamikoChannel:
    """A command that runs over a paramiko connection."""

    def __init__(self, channel: paramiko.Channel, host: str) -> None:
        self._channel = channel
        self._host = host
        self._stderr = b""

    def write(self, data: bytes) -> None:
        """Send data to the command's standard input.

        Raises:
            ConnectionLost: the host no longer accepts data.
        """
        self._channel.settimeout(SEND_TIMEOUT_S)
        try:
            self._channel.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"{self._host}: connection lost: {error or 'the host accepts no more data'}") from None

    def read(self, timeout_s: float) -> bytes | None:
        """Read from the command's standard output: b"" at its end, None after ``timeout_s`` without data."""
        self._channel.settimeout(timeout_s)
        try:
            return self._channel.recv(1 << 18)
        except TimeoutError:
            return None

    @property
    def is_open(self) -> bool:
        """True if the command still runs, as far as this side knows."""
        transport = self._channel.get_transport()
        return not self._channel.closed and not self._channel.eof_received and transport.is_active()

    def stderr_tail(self) -> str:
        """End of the command's standard error."""
        while self._channel.recv_stderr_ready():
            self._stderr = (self._stderr + self._channel.recv_stderr(1 << 16))[-2000:]
        return self._stderr.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        """Close the channel."""
        with suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()
        self._channel.close()


class ParamikoConnection:
    """An authenticated connection, with the connections to its jump hosts."""

    def __init__(
        self,
        name: str,
        transports: Sequence[paramiko.Transport],
        proxy: CommandSocket | None,
        environment: Mapping[str, str],
    ) -> None:
        self._name = name
        self._transports = tuple(transports)
        self._transport = transports[-1]
        self._proxy = proxy
        self._environment = environment

    @property
    def is_open(self) -> bool:
        """True if all hops are open, as far as this side knows."""
        return all(transport.is_active() for transport in self._transports)

    def start(self, command: str) -> ParamikoChannel:
        """Run a command line in the user's login shell.

        Raises:
            SchedulerError: the host refuses.
        """
        channel = self._session()
        try:
            channel.exec_command(command)
        except paramiko.SSHException as error:
            raise self._session_failure(error) from None
        return ParamikoChannel(channel, self._name)

    def sftp(self) -> paramiko.SFTPClient:
        """Open a client of the host's SFTP server; the caller closes the client.

        Raises:
            SchedulerError: the host has no SFTP server.
        """
        channel = self._session()
        channel.settimeout(_SESSION_S)
        try:
            channel.invoke_subsystem("sftp")
            return paramiko.SFTPClient(channel)
        except (paramiko.SSHException, OSError, EOFError) as error:
            channel.close()
            raise SchedulerError(f"{self._name}: has no SFTP server: {error}", transient=False) from None

    def run_interactive(self, command: str) -> int:
        """Run a command line on our own terminal; return its exit status.

        Raises:
            ConnectionLost: the connection was lost before the command ended.
        """
        channel = self._session()
        has_pty = sys.stdin.isatty()
        try:
            if has_pty:
                columns, rows = window_size(sys.stdin.fileno())
                channel.get_pty(self._environment.get("TERM", "vt100"), columns, rows)
            channel.exec_command(command)
        except paramiko.SSHException as error:
            raise self._session_failure(error) from None
        watch = _Liveness(self._transport)
        try:
            asked = lend(channel, has_pty=has_pty, is_alive=watch.is_alive)
            if asked is not None:
                return 128 + asked
            return self._status(channel, watch)
        except OSError as error:
            if not self.is_open:
                raise self._lost() from None
            raise error
        finally:
            watch.stop()
            channel.close()

    def close(self) -> None:
        """Close the connection, the last hop first."""
        for transport in reversed(self._transports):
            transport.close()
        if self._proxy is not None:
            self._proxy.close()

    def _session(self) -> paramiko.Channel:
        try:
            return self._transport.open_session(timeout=_SESSION_S)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._session_failure(error) from None

    def _session_failure(self, error: Exception) -> SchedulerError:
        if not self.is_open:
            return self._lost()
        return SchedulerError(
            f"{self._name}: cannot open a session: {error or 'no answer'}; "
            "does the host allow another session (MaxSessions)?",
            transient=True,
        )

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"{self._name}: connection lost; the command on the terminal may still run on the host")

    def _status(self, channel: paramiko.Channel, watch: "_Liveness") -> int:
        # paramiko reports -1 both for a command ended by a signal and for a lost connection.
        channel.status_event.wait(_KEEPALIVE_S)
        status = channel.exit_status
        if status != -1:
            return status
        if not self.is_open or not watch.is_alive():
            raise self._lost()
        raise SchedulerError(f"{self._name}: the command was ended by a signal", transient=False)


class _TunnelSocket:
    """Channel to the next host, as the socket of the connection to that host."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self.settimeout = channel.settimeout
        self.send = channel.send
        self.recv = channel.recv
        self.getpeername = channel.getpeername

    @property
    def _closed(self) -> bool:
        """True if closed; paramiko reads this attribute of its socket."""
        return self._channel.closed

    def close(self) -> None:
        # Called in a paramiko thread, which would print a traceback if the connection below was lost first.
        with suppress(EOFError, OSError, paramiko.SSHException):
            self._channel.close()


class _Liveness:
    """Pings the host every few seconds, as OpenSSH's ServerAliveInterval does."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._heard = time.monotonic()
        self._stopping = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def is_alive(self) -> bool:
        """True if an answer has come within 20 s."""
        return self._transport.is_active() and time.monotonic() - self._heard < _SILENCE_S

    def stop(self) -> None:
        """Stop the pings."""
        self._stopping.set()

    def _ask(self) -> None:
        while not self._stopping.wait(_KEEPALIVE_S):
            # Every server refuses this request, and the refusal is the answer (OpenSSH, PROTOCOL 2.3).
            with suppress(Exception):
                self._transport.global_request("keepalive@openssh.com", wait=True)
            if not self._transport.is_active():
                return
            self._heard = time.monotonic()


def connect(
    chain: Sequence[SshConfig],
    credentials: Credentials,
    environment: Mapping[str, str],
    through: Callable[[SshConfig], CommandSocket] | None = None,
) -> ParamikoConnection:
    """Connect to the last host of a chain through all hosts before it.

    Args:
        chain: see ssh_config.resolve_chain.
        credentials: of the user.
        environment: of a ProxyCommand.
        through: opens the stream to the first host, if a ControlMaster reaches the jump host before it.

    Raises:
        SchedulerError: the connection failed; the message names the hop and the reason.
    """
    transports: list[paramiko.Transport] = []
    first = chain[0]
    proxy = through(first) if through is not None else None
    try:
        if proxy is None and first.proxy_command:
            proxy = CommandSocket(["/bin/sh", "-c", f"exec {first.proxy_command}"], environment)
        stream = proxy.socket if proxy is not None else connect_tcp(first)
        for number, config in enumerate(chain):
            under = stream if number == 0 else _tunnel(transports[-1], chain[number - 1], config)
            transport = paramiko.Transport(under, default_window_size=_WINDOW)
            transports.append(transport)
            _secure(transport, config, proxy if number == 0 else None)
            Login(transport, config, credentials).run()
            transport.set_keepalive(_KEEPALIVE_S)
    except BaseException:
        for transport in reversed(transports):
            transport.close()
        if proxy is not None:
            proxy.close()
        raise
    return ParamikoConnection(chain[-1].name, transports, proxy, environment)


def _tunnel(transport: paramiko.Transport, hop: SshConfig, config: SshConfig) -> paramiko.Channel:
    patience = config.connect_timeout_s or CONNECT_TIMEOUT_S
    try:
        place = config.hostname, config.port
        channel = transport.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=patience)
        return cast(paramiko.Channel, _TunnelSocket(channel))
    except paramiko.ChannelException as error:
        # RFC 4254, 5.1: 1 is "administratively prohibited", 2 "connect failed".
        what = "does not forward connections" if error.code == 1 else "cannot reach the host"
        raise SchedulerError(
            f"{config.name}: the jump host {hop.name} {what} ({config.hostname} port {config.port}): {error.text}",
            transient=error.code != 1,
        ) from None
    except (paramiko.SSHException, EOFError) as error:
        what = "no answer" if transport.is_active() else "connection lost"
        raise SchedulerError(
            f"{config.name}: not reached through the jump host {hop.name} within {patience:.0f} s: {error or what}",
            transient=True,
        ) from None


def _secure(transport: paramiko.Transport, config: SshConfig, proxy: CommandSocket | None) -> None:
    """Run the ssh handshake with a host and check its host key."""
    transport.banner_timeout = _HANDSHAKE_S
    transport.handshake_timeout = _HANDSHAKE_S
    known = known_keys(config)
    options = transport.get_security_options()
    options.key_types = preferred_algorithms(known, options.key_types)
    try:
        transport.start_client(timeout=2 * _HANDSHAKE_S)
    except (paramiko.SSHException, EOFError, OSError) as error:
        said = (
            f"; output of the ProxyCommand: {proxy.stderr_tail()}" if proxy is not None and proxy.stderr_tail() else ""
        )
        is_final = isinstance(error, paramiko.ssh_exception.IncompatiblePeer)
        what = str(error) or "the host closed the connection"
        raise SchedulerError(
            f"{config.name}: no ssh connection to {config.hostname} port {config.port}: {what}{said}",
            transient=not is_final,
        ) from None
    key = transport.get_remote_server_key()
    check_host_key(config, known, key.get_name(), key.asbytes())
