"""A connection that the user's own ssh has opened already (ControlMaster): used, never made and never ended here.

Sites with one-time passwords let nothing else in without a person at the keyboard.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from llmctl.errors import SchedulerError
from llmctl.transport.local import LocalTransport
from llmctl.transport.ssh.connection import ProcessChannel
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.sockets import CommandSocket
from llmctl.transport.ssh.ssh_config import SshConfig, ssh_program, target_words

if TYPE_CHECKING:
    import paramiko

_CHECK_S = 10.0
_SFTP_PATIENCE_S = 60.0
# Whatever the user's configuration wants done with a connection of its own is not done once more with ours.
_OPTIONS = (
    "-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none",
    "-o", "PermitLocalCommand=no", "-o", "ForwardX11=no",
)  # fmt: skip


class _PipeSocket:
    """What paramiko's SFTP client asks of a channel, over a process."""

    def __init__(self, channel: ProcessChannel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> int:
        self._channel.write(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        # Never more than asked for: the client reads lengths and contents one after the other.
        data = self._channel.read(_SFTP_PATIENCE_S, size)
        if data is None:
            raise EOFError
        return data

    def get_name(self) -> str:
        return "sftp"  # for paramiko's log

    def close(self) -> None:
        self._channel.close()


class MasterConnection:
    """OpenSSH's client over a ControlMaster that is running."""

    def __init__(self, config: SshConfig, environment: Mapping[str, str]) -> None:
        self._config = config
        self._environment = environment
        self._words = target_words(config)
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether we have not let go of it."""
        return not self._is_closed

    def start(self, command: str) -> ProcessChannel:
        """Have the user's login shell run a command line."""
        return self._client(["-T"], [command])

    def sftp(self) -> "paramiko.SFTPClient":
        """A client of the host's SFTP server; the caller closes it.

        Raises:
            SchedulerError: the host has none.
        """
        import paramiko

        channel = self._client(["-s"], ["sftp"])
        try:
            return paramiko.SFTPClient(cast("paramiko.Channel", _PipeSocket(channel)))
        except (paramiko.SSHException, OSError, EOFError, ConnectionLost):
            said = channel.stderr_tail()
            channel.close()
            raise SchedulerError(f"{self._config.name}: has no SFTP server: {said}", transient=False) from None

    def run_interactive(self, command: str) -> int:
        """Run a command line on our own terminal; its exit status.

        Raises:
            ConnectionLost: the connection went before the command ended.
        """
        terminal = "-t" if sys.stdin.isatty() else "-T"
        argv = [ssh_program(self._environment), *_OPTIONS, terminal, *self._words, command]
        status = LocalTransport(self._environment).run_interactive(argv)
        # 255 is also ssh's own word for a connection that broke.
        if status == 255 and not is_running(self._config, self._environment):
            raise ConnectionLost(f"{self._config.name}: connection lost; what ran on the terminal may go on there")
        return status

    def close(self) -> None:
        """Let go of it; it is the user's."""
        self._is_closed = True

    def _client(self, options: list[str], command: list[str]) -> ProcessChannel:
        argv = [ssh_program(self._environment), *_OPTIONS, *options, *self._words, *command]
        return ProcessChannel(argv, self._environment, self._config.name)


def is_running(config: SshConfig, environment: Mapping[str, str]) -> bool:
    """Whether the user has a ControlMaster for a host."""
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
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def forward(hop: SshConfig, environment: Mapping[str, str], target: SshConfig) -> CommandSocket:
    """A stream to a host behind a jump host that the user has a ControlMaster for."""
    place = f"[{target.hostname}]:{target.port}"
    argv = [ssh_program(environment), "-o", "ControlMaster=no", "-o", "BatchMode=yes", "-W", place, *target_words(hop)]
    return CommandSocket(argv, environment)
