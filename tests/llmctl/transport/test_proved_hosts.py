"""Connections to ssh servers in this process: no host is logged in to before its key has been checked."""

import socket
import threading

import paramiko
import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.authentication import Credentials
from llmctl.transport.ssh.paramiko_connection import connect
from llmctl.transport.ssh.ssh_config import SshConfig
from tests.waiting import HANG_S

KEYS = {name: paramiko.ECDSAKey.generate() for name in ("hop", "host", "other")}


class Server(paramiko.ServerInterface):
    """Lets everyone in, notes the login, and forwards to the host behind the hop."""

    def __init__(self, name: str, logins: list[str]) -> None:
        self.name, self.logins = name, logins

    def check_auth_none(self, username: str) -> int:
        del username
        self.logins.append(self.name)
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_direct_tcpip_request(self, chanid: int, origin: object, destination: object) -> int:
        del chanid, origin, destination
        return paramiko.common.OPEN_SUCCEEDED


def serve(listener: socket.socket, logins: list[str], transports: list[paramiko.Transport]) -> None:
    """The hop on the first connection, and the host behind its first forwarded channel."""
    under, _ = listener.accept()
    for name in ("hop", "host"):
        transport = paramiko.Transport(under)
        transports.append(transport)
        transport.add_server_key(KEYS[name])
        try:
            transport.start_server(server=Server(name, logins))
        except (paramiko.SSHException, EOFError):
            return
        # A closed transport does not end the wait for a channel.
        while (under := transport.accept(0.05)) is None:
            if not transport.is_active():
                return


@pytest.fixture
def servers():
    """Port of the hop, and the servers that were asked to let someone in."""
    logins: list[str] = []
    transports: list[paramiko.Transport] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, logins, transports))
        thread.start()
        yield listener.getsockname()[1], logins
        for transport in transports:
            transport.close()
        thread.join(HANG_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("shown", "refused", "entered"),
    [
        ({}, "hop: its host key is unknown", []),
        ({"hop": "other"}, "hop: ITS HOST KEY HAS CHANGED", []),
        ({"hop": "hop"}, "host: its host key is unknown", ["hop"]),
        ({"hop": "hop", "host": "other"}, "host: ITS HOST KEY HAS CHANGED", ["hop"]),
        ({"hop": "hop", "host": "host"}, None, ["hop", "host"]),
    ],
)
def test_no_hop_is_logged_in_to_before_its_key_is_checked(servers, tmp_path, shown, refused, entered):
    port, logins = servers
    known = tmp_path / "known_hosts"
    names = {"hop": f"[127.0.0.1]:{port}", "host": "inner.example"}
    text = "".join(f"{names[name]} {KEYS[key].get_name()} {KEYS[key].get_base64()}\n" for name, key in shown.items())
    known.write_text(text)
    chain = [
        SshConfig("hop", "127.0.0.1", port, "ada", known_hosts=(str(known),)),
        SshConfig("host", "inner.example", 22, "ada", known_hosts=(str(known),)),
    ]
    credentials = Credentials({}, terminal=None, may_ask=False)
    if refused is None:
        connect(chain, credentials, {}).close()
    else:
        with pytest.raises(SchedulerError, match=refused):
            connect(chain, credentials, {})
    assert logins == entered
    assert known.read_text() == text
