"""Files sent by SFTP, over a channel to the host's SFTP server."""

from contextlib import suppress
from typing import IO, Protocol, cast

import paramiko

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.failures import BROKEN, ConnectionLost, reason, told_as_lost
from llmctl.transport.ssh.paramiko_channel import LIBRARY


class SftpChannel(Protocol):
    """Part of paramiko's channel that its SFTP client uses."""

    def send(self, data: bytes) -> int:
        """Send some of the data; return the number of bytes."""

    def recv(self, size: int) -> bytes:
        """Receive up to ``size`` bytes; b"" at the end."""

    def get_name(self) -> str:
        """Name for paramiko's log."""

    def close(self) -> None:
        """Close the channel."""


def send_file(channel: SftpChannel, host: str, file: IO[bytes], place: str) -> None:
    """Send a file from its present position, and close the channel.

    Raises:
        SchedulerError: the host has no SFTP server, or does not accept the file, or the connection was lost.
    """
    try:
        client = paramiko.SFTPClient(cast("paramiko.Channel", channel))
        client.putfo(file, place, confirm=False)
    except (ConnectionLost,) + BROKEN + LIBRARY as error:
        # Over SFTP a refusal and a loss look alike. The next call on the connection knows.
        why = error.message if isinstance(error, ConnectionLost) else reason(error)
        raise SchedulerError(f"{host}: a file cannot be sent by SFTP: {why}", transient=True) from None
    finally:
        with suppress(ConnectionLost), told_as_lost(host, *LIBRARY):
            channel.close()
