"""Connections that break during any call: every error of theirs is a ConnectionLost, and a loss at the start too."""

import errno
import io
import itertools
import os
import threading

import paramiko
import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.ssh import paramiko_channel, paramiko_connection
from llmctl.transport.ssh.connection import ProcessChannel
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.paramiko_connection import ParamikoConnection
from tests.llmctl.transport.agents import PipeRoute, agent
from tests.llmctl.transport.ssh_server import ServerRoute
from tests.waiting import HANG_S

ERRORS = [
    EOFError(),
    OSError("Socket is closed"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    TimeoutError(),
    paramiko.SSHException("Key-exchange timed out waiting for key negotiation"),
    ValueError("I/O operation on closed file"),
]


def every_call(*calls):
    """Every error in each of the calls, except that a read without data is not a loss."""
    cases = [(call, error) for call in calls for error in ERRORS if call != "recv" or type(error) is not TimeoutError]
    return pytest.mark.parametrize(
        ("call", "error"), cases, ids=lambda part: getattr(part, "lower", type(part).__name__.lower)()
    )


class Broken:
    """paramiko's transport and channel, of which the named call raises an error, as a broken connection does."""

    closed = eof_received = False
    exit_status = -1

    def __init__(self, call, error):
        self._call, self._error = call, error
        self._pipe = os.pipe()
        if call in ("recv", "recv_stderr"):
            os.write(self._pipe[1], b"x")  # output has come
        self.calls = []
        self.status_event = self

    def __getattr__(self, name):
        def call(*_args, **_options):
            self.calls.append(name)
            if name == self._call:
                self.closed = True
                os.write(self._pipe[1], b"x")  # readable, as paramiko makes it at the end
                raise self._error
            return {"open_session": self, "get_transport": self, "send_ready": True, "send": 1, "recv": b""}.get(name)

        return call

    def fileno(self):
        return self._pipe[0]

    def is_active(self):
        return not self.closed

    def recv_stderr_ready(self):
        return self._call == "recv_stderr"


@pytest.fixture
def broken(monkeypatch):
    """Make a connection of which one call breaks, while the user has typed something."""
    made, (ours, theirs) = [], os.pipe()

    def make(call, error):
        made.append(Broken(call, error))
        return ParamikoConnection("h1", [made[-1]], None, {}), made[-1]

    with os.fdopen(ours) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(theirs, b"x")
        os.close(theirs)
        yield make
    for channel in made:
        for descriptor in channel._pipe:
            os.close(descriptor)


@every_call("sendall", "recv")
def test_a_write_or_read_on_a_broken_connection_is_a_loss(broken, call, error):
    channel = broken(call, error)[0].start("true")
    with pytest.raises(ConnectionLost, match="^h1: connection lost: [A-Za-z]") as caught:
        channel.write(b"x") if call == "sendall" else channel.read(1.0)
    assert caught.value.transient


@every_call("shutdown_write", "close", "recv_stderr")
def test_a_broken_channel_can_be_closed(broken, call, error):
    connection, channel = broken(call, error)
    started = connection.start("true")
    assert started.stderr_tail() == ""
    started.close()
    assert channel.calls[-2:] == ["shutdown_write", "close"]


@every_call("open_session", "exec_command")
def test_a_command_on_a_broken_connection_is_a_loss(broken, call, error):
    for begin in ("start", "run_interactive"):
        with pytest.raises(ConnectionLost, match="^h1: connection lost: [A-Za-z]"):
            getattr(broken(call, error)[0], begin)("true")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_refused_session_is_no_loss(broken, error):
    connection, channel = broken("invoke_subsystem", error)
    channel.is_active = lambda: True
    with pytest.raises(SchedulerError) as caught:
        connection.send_file(io.BytesIO(b"x"), "/place")
    is_refusal = isinstance(error, paramiko.SSHException)
    assert isinstance(caught.value, ConnectionLost) is not is_refusal
    assert caught.value.transient
    assert channel.calls[-1] == "close"


@every_call("send", "shutdown_write", "recv_stderr", "recv")
def test_a_command_on_the_terminal_of_a_broken_connection_is_a_loss(broken, capfd, call, error):
    with pytest.raises(ConnectionLost, match="h1: connection lost; the command on the terminal may still run"):
        broken(call, error)[0].run_interactive("cat")
    assert capfd.readouterr() == ("", "")


class Clock:
    """A clock that goes on by a second at every look."""

    def __init__(self):
        self._looks = itertools.count()

    def monotonic(self):
        return float(next(self._looks))


def test_output_is_a_sign_of_life_while_the_answer_to_a_ping_is_behind_it(monkeypatch, capfdbinary):
    """16 MiB may be under way, more than a slow line carries in the time after which a silent host is lost."""
    size, answered = 1 << 25, threading.Event()

    def print_much(channel, _command):
        channel.sendall(b"x" * size)
        channel.send_exit_status(3)
        channel.close()

    route = ServerRoute(print_much)
    connection = route.open()
    monkeypatch.setattr(connection._transport, "global_request", lambda *_args, **_options: answered.wait(HANG_S))
    clock = Clock()
    for module in (paramiko_connection, paramiko_channel):
        monkeypatch.setattr(module, "time", clock)
    ours, theirs = os.pipe()
    os.close(theirs)
    with os.fdopen(ours) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        try:
            assert connection.run_interactive("print much") == 3
        finally:
            answered.set()
            connection.close()
            route.close()
    assert len(capfdbinary.readouterr().out) == size
    assert clock.monotonic() > 2 * paramiko_connection._SILENCE_S


def test_a_closed_pipe_to_an_ssh_client_is_a_loss():
    channel = ProcessChannel(["cat"], dict(os.environ), "h1")
    channel.close()
    channel.close()
    for act in (lambda: channel.write(b"x"), lambda: channel.read(0.0)):
        with pytest.raises(ConnectionLost, match="^h1: connection lost: "):
            act()
    assert channel.stderr_tail() == ""
    with pytest.raises(SchedulerError, match="no-such-ssh: cannot be started: No such file"):
        ProcessChannel(["no-such-ssh"], dict(os.environ), "h1")


# --- The whole way, over an ssh server in this process


@pytest.fixture
def serving():
    made = []

    def serve(*acts):
        made.append(ServerRoute(*acts))
        return made[-1]

    yield serve
    for route in made:
        route.close()


def drop(channel, _command):
    channel.recv(1)
    channel.get_transport().close()


def refuse(channel, _command):
    channel.recv(1)
    channel.sendall(b"This account is currently not available.\n")
    channel.send_exit_status(1)
    channel.close()


def test_a_write_that_breaks_reconnects(serving):
    route = serving()
    transport = agent(route)
    assert transport.list_names(["/nonexistent"]) == [[]]
    route.wire.is_cut = True
    assert transport.list_names(["/nonexistent"]) == [[]]
    assert transport.warnings[0] == "connection to login lost; reconnecting"
    route.wire.is_cut = True
    with pytest.raises(ConnectionLost, match="login: connection lost while `true` ran; the outcome is unknown"):
        transport.run(["true"], timeout_s=HANG_S)
    transport.close()


def test_a_loss_before_python_starts_is_no_fault_of_the_login_shell(serving):
    transport = agent(serving(drop), first_patience_s=HANG_S)
    assert transport.list_names(["/nonexistent"]) == [[]]
    transport.close()
    with pytest.raises(ConnectionLost, match="login: connection lost before Python started; the last output: nothing"):
        agent(serving(drop), first_patience_s=0.0).home()


@pytest.mark.parametrize("end", ["echo mux_client: broken pipe >&2; exit 255", "echo broken pipe; kill -9 $$"])
def test_an_ssh_client_that_fails_before_python_starts_is_a_loss(end):
    with pytest.raises(ConnectionLost, match="the last output: .*broken pipe"):
        agent(PipeRoute("sh", "-c", end), first_patience_s=0.0).home()


def test_a_login_shell_that_refuses_is_told(serving):
    with pytest.raises(SchedulerError, match="its output: This account is currently not available") as caught:
        agent(serving(refuse)).home()
    assert not caught.value.transient


@pytest.mark.parametrize("typed", [b"x", b""], ids=["while typing", "at the end of the input"])
def test_a_session_whose_connection_breaks_is_a_loss(serving, monkeypatch, typed):
    def cut(channel, _command):
        channel.sendall(b"ready\n")

    route = serving(cut)
    connection = route.open()
    ours, theirs = os.pipe()
    with os.fdopen(ours) as stdin, os.fdopen(theirs, "wb", buffering=0) as keys:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("llmctl.transport.ssh.terminal._write", lambda *_: cut_wire())

        def cut_wire():
            route.wire.is_cut = True
            keys.write(typed) if typed else keys.close()

        with pytest.raises(ConnectionLost, match="the command on the terminal may still run on the host"):
            connection.run_interactive("cat")
    connection.close()


def test_a_session_ends_with_its_status_although_the_connection_breaks_then(serving, monkeypatch):
    def end(channel, _command):
        route.wire.is_cut = True
        channel.send_exit_status(5)
        channel.shutdown_write()

    route = serving(end)
    connection = route.open()
    ours, theirs = os.pipe()
    with os.fdopen(ours) as stdin, os.fdopen(theirs, "wb"):
        monkeypatch.setattr("sys.stdin", stdin)
        assert connection.run_interactive("true") == 5
    connection.close()
