"""Connection of our own, made with paramiko: through jump hosts if needed, each of them verified."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, cast

import paramiko

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.authentication import Credentials, Login
from llmctl.transport.ssh.failures import BROKEN, ConnectionLost, reason, told_as_lost
from llmctl.transport.ssh.host_keys import check_host_key, known_keys, preferred_algorithms
from llmctl.transport.ssh.paramiko_channel import LIBRARY, ParamikoChannel
from llmctl.transport.ssh.sftp import send_file
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
        return ParamikoChannel(self._session(lambda channel: channel.exec_command(command)), self._name)

    def send_file(self, file: IO[bytes], place: str) -> None:
        """Send a file from its present position to the host, by SFTP.

        Raises:
            ConnectionLost: the connection was lost before the file was sent.
            SchedulerError: the host has no SFTP server, or does not accept the file.
        """
        channel = self._session(lambda channel: channel.invoke_subsystem("sftp"))
        channel.settimeout(_SESSION_S)
        send_file(channel, self._name, file, place)

    def run_interactive(self, command: str) -> int:
        """Run a command line on our own terminal; return its exit status.

        Raises:
            ConnectionLost: the connection was lost before the command ended.
        """
        has_pty = sys.stdin.isatty()
        size = window_size(sys.stdin.fileno()) if has_pty else None

        def begin(channel: paramiko.Channel) -> None:
            if size is not None:
                channel.get_pty(self._environment.get("TERM", "vt100"), *size)
            channel.exec_command(command)

        channel = ParamikoChannel(self._session(begin), self._name)
        watch = _Liveness(self._transport, channel)
        try:
            asked = lend(channel, has_pty=has_pty, is_alive=watch.is_alive)
            return 128 + asked if asked is not None else self._status(channel, watch)
        except ConnectionLost:
            raise self._lost() from None
        finally:
            watch.stop()
            channel.close()

    def close(self) -> None:
        """Close the connection, the last hop first."""
        _close(self._transports, self._proxy)

    def _session(self, begin: Callable[[paramiko.Channel], None]) -> paramiko.Channel:
        """Session on the host, in which ``begin`` has started something."""
        session: paramiko.Channel | None = None
        try:
            session = self._transport.open_session(timeout=_SESSION_S)
            begin(session)
        except BROKEN + LIBRARY as error:
            if session is not None:
                ParamikoChannel(session, self._name).close()
            raise self._session_failure(error) from None
        return session

    def _session_failure(self, error: Exception) -> SchedulerError:
        # A refusal is an error of paramiko, while the connection goes on.
        if not isinstance(error, LIBRARY) or not self.is_open:
            return ConnectionLost(f"{self._name}: connection lost: {reason(error)}")
        return SchedulerError(
            f"{self._name}: cannot open a session: {str(error) or 'no answer'}; "
            "does the host allow another session (MaxSessions)?",
            transient=True,
        )

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"{self._name}: connection lost; the command on the terminal may still run on the host")

    def _status(self, channel: ParamikoChannel, watch: "_Liveness") -> int:
        status = channel.exit_status()
        if status is not None:
            return status
        if channel.was_cut or not self.is_open or not watch.is_alive():
            raise self._lost()
        raise SchedulerError(f"{self._name}: the command was ended by a signal", transient=False)


class _TunnelSocket:
    """Channel to the next host, as the socket of the connection to that host."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._is_closed_here = False
        self.settimeout = channel.settimeout
        self.send = channel.send
        self.recv = channel.recv
        self.getpeername = channel.getpeername

    @property
    def _closed(self) -> bool:
        """True if closed; paramiko reads this attribute of its socket."""
        return self._channel.closed

    @property
    def was_cut(self) -> bool:
        """True if the connection below was lost, and neither end closed this one."""
        return self._channel.closed and not self._channel.eof_received and not self._is_closed_here

    def close(self) -> None:
        self._is_closed_here = self._is_closed_here or not self._channel.closed
        # Called in a paramiko thread, which would print a traceback if the connection below was lost first.
        with suppress(*BROKEN, *LIBRARY):
            self._channel.close()


class _Liveness:
    """Pings the host every few seconds, as OpenSSH's ServerAliveInterval does.

    Output counts as an answer: the answer to a ping comes after the output that was sent before it, and a slow line
    takes longer than the limit for a full window.
    """

    def __init__(self, transport: paramiko.Transport, channel: ParamikoChannel) -> None:
        self._transport = transport
        self._channel = channel
        self._heard = time.monotonic()
        self._stopping = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def is_alive(self) -> bool:
        """True if an answer or output has come within 20 s."""
        heard = max(self._heard, self._channel.heard_at)
        return self._transport.is_active() and time.monotonic() - heard < _SILENCE_S

    def stop(self) -> None:
        """Stop the pings."""
        self._stopping.set()

    def _ask(self) -> None:
        while not self._stopping.wait(_KEEPALIVE_S):
            # Every server refuses this request, and the refusal is the answer (OpenSSH, PROTOCOL 2.3).
            with suppress(Exception):
                self._transport.global_request("keepalive@openssh.com", wait=True)
                self._heard = time.monotonic()
            if not self._transport.is_active():
                return


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
    under: socket.socket | _TunnelSocket
    first = chain[0]
    proxy = through(first) if through is not None else None
    try:
        if proxy is None and first.proxy_command:
            proxy = CommandSocket(["/bin/sh", "-c", f"exec {first.proxy_command}"], environment)
        stream = proxy.socket if proxy is not None else connect_tcp(first)
        for number, config in enumerate(chain):
            under = stream if number == 0 else _tunnel(transports[-1], chain[number - 1], config)
            with told_as_lost(config.name, *LIBRARY):
                transport = paramiko.Transport(cast("socket.socket", under), default_window_size=_WINDOW)
            transports.append(transport)
            # Each host is checked and logged in before the next is reached through it.
            _secure(transport, config, proxy if number == 0 else None)
            _log_in(Login(transport, config, credentials), under, config, chain[number - 1])
            transport.set_keepalive(_KEEPALIVE_S)
    except BaseException:
        _close(transports, proxy)
        raise
    return ParamikoConnection(chain[-1].name, transports, proxy, environment)


def _close(transports: Sequence[paramiko.Transport], proxy: CommandSocket | None) -> None:
    for transport in reversed(transports):
        with suppress(*BROKEN, *LIBRARY):
            transport.close()
    if proxy is not None:
        proxy.close()


def _log_in(login: Login, under: "socket.socket | _TunnelSocket", config: SshConfig, hop: SshConfig) -> None:
    try:
        login.run()
    except SchedulerError:
        # The host has not refused anyone: the jump host's connection ended in the middle.
        if isinstance(under, _TunnelSocket) and under.was_cut:
            raise ConnectionLost(f"{config.name}: connection to the jump host {hop.name} lost") from None
        raise


def _tunnel(transport: paramiko.Transport, hop: SshConfig, config: SshConfig) -> "_TunnelSocket":
    patience = config.connect_timeout_s or CONNECT_TIMEOUT_S
    try:
        place = config.hostname, config.port
        channel = transport.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=patience)
        return _TunnelSocket(channel)
    except paramiko.ChannelException as error:
        # RFC 4254, 5.1: 1 is "administratively prohibited", 2 "connect failed".
        what = "does not forward connections" if error.code == 1 else "cannot reach the host"
        raise SchedulerError(
            f"{config.name}: the jump host {hop.name} {what} ({config.hostname} port {config.port}): {error.text}",
            transient=error.code != 1,
        ) from None
    except BROKEN + LIBRARY as error:
        what = str(error) or ("no answer" if transport.is_active() else "connection lost")
        raise SchedulerError(
            f"{config.name}: not reached through the jump host {hop.name} within {patience:.0f} s: {what}",
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
        key = transport.get_remote_server_key()
    except BROKEN + LIBRARY as error:
        said = (
            f"; output of the ProxyCommand: {proxy.stderr_tail()}" if proxy is not None and proxy.stderr_tail() else ""
        )
        is_final = isinstance(error, paramiko.ssh_exception.IncompatiblePeer)
        what = str(error) or "the host closed the connection"
        raise SchedulerError(
            f"{config.name}: no ssh connection to {config.hostname} port {config.port}: {what}{said}",
            transient=not is_final,
        ) from None
    check_host_key(config, known, key.get_name(), key.asbytes())
