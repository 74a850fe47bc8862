"""Connection over the user's running ssh (ControlMaster). llmctl uses such a connection, and never opens or ends one.

Sites with one-time passwords accept no other connection without a person at the keyboard.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from llmctl.transport.local import LocalTransport
from llmctl.transport.ssh.connection import ProcessChannel
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.sockets import CommandSocket
from llmctl.transport.ssh.ssh_config import SshConfig, ssh_program, target_words

_CHECK_S = 10.0
_SFTP_TIMEOUT_S = 60.0
# Our client must not repeat what the user's configuration does for each new connection, such as forwarding ports.
_OPTIONS = (
    "-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none",
    "-o", "PermitLocalCommand=no", "-o", "ForwardX11=no",
)  # fmt: skip


class _PipeSocket:
    """Channel interface of paramiko's SFTP client, over a process."""

    def __init__(self, channel: ProcessChannel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> int:
        self._channel.write(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        # Never more than ``size`` bytes: the client reads lengths and contents one after the other.
        data = self._channel.read(_SFTP_TIMEOUT_S, size)
        if data is None:
            raise EOFError
        return data

    def get_name(self) -> str:
        return "sftp"  # for paramiko's log

    def close(self) -> None:
        self._channel.close()


class MasterConnection:
    """OpenSSH's client over a running ControlMaster."""

    def __init__(self, config: SshConfig, environment: Mapping[str, str]) -> None:
        self._config = config
        self._environment = environment
        self._words = target_words(config)
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """True until ``close``."""
        return not self._is_closed

    def start(self, command: str) -> ProcessChannel:
        """Run a command line in the user's login shell."""
        return self._client(["-T"], [command])

    def send_file(self, file: IO[bytes], place: str) -> None:
        """Send a file from its present position to the host, by SFTP.

        Raises:
            SchedulerError: the host has no SFTP server, or does not accept the file, or the connection was lost.
        """
        from llmctl.transport.ssh.sftp import send_file

        send_file(_PipeSocket(self._client(["-s"], ["sftp"])), self._config.name, file, place)

    def run_interactive(self, command: str) -> int:
        """Run a command line on our own terminal; return its exit status.

        Raises:
            ConnectionLost: the connection was lost before the command ended.
        """
        terminal = "-t" if sys.stdin.isatty() else "-T"
        argv = [ssh_program(self._environment), *_OPTIONS, terminal, *self._words, command]
        status = LocalTransport(self._environment).run_interactive(argv)
        # ssh also exits with 255 if the connection broke.
        if status == 255 and not is_running(self._config, self._environment):
            raise ConnectionLost(
                f"{self._config.name}: connection lost; the command on the terminal may still run on the host"
            )
        return status

    def close(self) -> None:
        """Stop using the connection, which stays open for the user."""
        self._is_closed = True

    def _client(self, options: list[str], command: list[str]) -> ProcessChannel:
        argv = [ssh_program(self._environment), *_OPTIONS, *options, *self._words, *command]
        return ProcessChannel(argv, self._environment, self._config.name)


def is_running(config: SshConfig, environment: Mapping[str, str]) -> bool:
    """True if the user has a running ControlMaster for a host."""
    if not config.has_control_path:
        return False
    argv = [ssh_program(environment), "-O", "check", *target_words(config)]
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def forward(hop: SshConfig, environment: Mapping[str, str], target: SshConfig) -> CommandSocket:
    """Open a stream to a host through the user's ControlMaster for its jump host."""
    place = f"[{target.hostname}]:{target.port}"
    argv = [ssh_program(environment), "-o", "ControlMaster=no", "-o", "BatchMode=yes", "-W", place, *target_words(hop)]
    return CommandSocket(argv, environment)
