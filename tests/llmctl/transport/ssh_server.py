"""An ssh server in this process, at the other end of a socket pair, and a wire that can be cut."""

import errno
import os
import socket
import subprocess
import threading
from contextlib import suppress

import paramiko

from llmctl.transport.ssh.paramiko_connection import ParamikoConnection

KEY = paramiko.ECDSAKey.generate()


class Wire:
    """Our end of the socket. Once cut it accepts no data; the first refused write also ends what can be read."""

    def __init__(self, end):
        self._end = end
        self._is_dead = False
        self.is_cut = False

    def send(self, data):
        if self.is_cut:
            self._is_dead = True
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return self._end.send(data)

    def recv(self, size):
        return b"" if self._is_dead else self._end.recv(size)

    def __getattr__(self, name):
        return getattr(self._end, name)


class Server(paramiko.ServerInterface):
    """Runs commands as a login shell would; ``acts`` replace it, one for each command, as long as there are any."""

    def __init__(self, acts):
        self._acts = acts

    def check_auth_none(self, _username):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, _kind, _number):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        act = self._acts.pop(0) if self._acts else run
        threading.Thread(target=act, args=(channel, command.decode()), daemon=True).start()
        return True


def run(channel, command):
    """Run a command, with its streams on a channel."""
    process = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True).start()
    with suppress(OSError, EOFError, paramiko.SSHException):
        while data := process.stdout.read(1 << 16):
            channel.sendall(data)
    channel.send_exit_status(process.wait())
    channel.close()


def _feed(channel, stdin):
    with suppress(OSError), stdin:
        while data := channel.recv(1 << 16):
            stdin.write(data)


class ServerRoute:
    """Route to the server.

    Attributes:
        wire: of the last connection.
        acts: see Server.
    """

    host = "login"

    def __init__(self, *acts):
        self.acts = list(acts)
        self.wire = None
        self._servers = []

    def open(self):
        ours, theirs = socket.socketpair()
        server = paramiko.Transport(theirs)
        server.add_server_key(KEY)
        server.start_server(server=Server(self.acts), event=threading.Event())
        self._servers.append(server)
        self.wire = Wire(ours)
        transport = paramiko.Transport(self.wire)
        transport.start_client()
        transport.auth_none("user")
        return ParamikoConnection("login", [transport], None, {})

    def give_up_asking(self):
        """Do nothing: the user was not asked."""

    def may_try_again(self, error):
        return error.transient

    def close(self):
        for server in self._servers:
            server.close()
