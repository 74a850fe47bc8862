"""Transport over real ssh when a connection fails, and commands on the user's terminal."""

import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.transport import RemoteTransport
from tests.schedulers.ssh_clients import client_environ, master, refusal, transport
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts
from tests.waiting import HANG_S, wait_for

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


# --- Failures on the route


def test_unreachable_hosts(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    environ = client_environ(
        ssh_hosts, tmp_path, "Host unused", "  HostName 127.0.0.1", "  Port 1", "Host silent", "  HostName 127.0.0.1"
    )
    assert "unused (127.0.0.1): nothing listens on port 1; is its sshd down?" in refusal(
        "unused", environ, transient=True, first_patience_s=0.5
    )
    assert "there is no host of this name" in refusal("no-such-host.invalid", environ, transient=False)
    ssh_hosts.stop_sshd("h3")
    try:
        message = refusal("h3", environ, transient=True, first_patience_s=0.5)
        assert "h3: the jump host gate cannot reach the host (10.98.3.3 port 22): " in message
    finally:
        ssh_hosts.start_sshd("h3")
    ssh_hosts.cut_network("h3")
    try:
        message = refusal("h3", environ, transient=True, first_patience_s=0.5)
        assert "h3: not reached through the jump host gate within 5 s" in message
    finally:
        ssh_hosts.heal_network("h3")


def test_a_port_without_an_ssh_server(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad\r\n" * 200), daemon=True).start()
        environ = client_environ(ssh_hosts, tmp_path, "Host web", "  HostName 127.0.0.1", f"  Port {port}")
        assert f"web: no ssh connection to 127.0.0.1 port {port}: " in refusal(
            "web", environ, transient=True, first_patience_s=0.1
        )


def lose(made: RemoteTransport) -> None:
    with pytest.raises(ConnectionLost):
        made.run(["sleep", "7000"], timeout_s=8000)


def test_a_cut_network_is_noticed_before_and_behind_the_jump_host(ssh_hosts: SshHosts) -> None:
    environ = ssh_hosts.environ()
    log = ssh_hosts.local / "log"
    with transport("gate", environ) as direct, transport("h2", environ) as behind, transport("h1", environ) as through:
        for made in (direct, behind, through):
            made.write_files([FileWrite(str(log), b"abcdef")])
        ssh_hosts.cut_network("h2")
        lose(behind)
        ssh_hosts.heal_network("h2")
        # A call that only reads is repeated on a new connection, with a warning.
        assert behind.read_parts([FileRead(str(log), 2)])[0].data == b"cdef"
        assert behind.warnings[0] == "connection to h2 lost; reconnecting"
        assert behind.warnings[1].startswith("reconnected to h2 after ")
        ssh_hosts.cut_network("gate")
        lose(direct)

        def heal() -> None:
            wait_for(lambda: bool(through.warnings), "the loss, in front of the jump host")  # type: ignore[attr-defined]
            ssh_hosts.heal_network("gate")

        healing = threading.Thread(target=heal)
        healing.start()
        assert through.read_parts([FileRead(str(log), 3)])[0].data == b"def"
        healing.join()
        assert through.warnings[0] == "connection to h1 lost; reconnecting"
        assert through.warnings[1].startswith("reconnected to h1 after ")
    wait_for(lambda: not ssh_hosts.processes("sleep 7000"), "the end of commands whose caller has ended")


def test_detached_jobs_survive_an_ended_session(ssh_hosts: SshHosts) -> None:
    with transport("h2", ssh_hosts.environ()) as made:
        job = made.start_detached(["sleep", "5000"], cwd="/", log=str(ssh_hosts.local / "job.log"))

        def drop() -> None:
            wait_for(lambda: ssh_hosts.processes("sleep 3000"), "the command")
            ssh_hosts.drop_sessions("h2")

        dropping = threading.Thread(target=drop)
        dropping.start()
        with pytest.raises(ConnectionLost, match="h2: connection lost while `sleep` ran; the outcome is unknown"):
            made.run(["sleep", "3000"], timeout_s=4000)
        dropping.join()
        assert made.inspect_processes([job]).alive == (True,)
        wait_for(lambda: not ssh_hosts.processes("sleep 3000"), "the end of the command")
        made.run(["kill", str(job.pid)], timeout_s=HANG_S)
        wait_for(lambda: made.inspect_processes([job]).alive == (False,), "the job's end")


def test_a_command_that_only_reads_is_repeated_after_a_loss(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    probe = ["bash", "-c", f"echo >>{begun}; until [ -e {go} ]; do sleep 0.1; done; echo found"]

    def drop() -> None:
        wait_for(begun.exists, "the command")
        ssh_hosts.drop_sessions("gate")
        go.touch()

    for only_reads in (True, False):
        begun.unlink(missing_ok=True)
        go.unlink(missing_ok=True)
        dropping = threading.Thread(target=drop)
        with transport("h1", ssh_hosts.environ()) as made:
            made.home()
            dropping.start()
            lost = nullcontext() if only_reads else pytest.raises(ConnectionLost, match="the outcome is unknown")
            with lost:
                assert made.run(probe, timeout_s=HANG_S, only_reads=only_reads).stdout == "found\n"
            dropping.join()
        assert len(begun.read_text()) == (2 if only_reads else 1)


def test_a_loss_before_the_agent_starts_is_no_fault_of_the_login_shell(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """The login shell waits in its start file when the jump host drops the session."""
    rc, begun, go = ssh_hosts.state / "home" / ".bashrc", tmp_path / "begun", tmp_path / "go"
    rc.write_text(f"touch {begun}; until [ -e {go} ]; do sleep 0.1; done\n")

    def drop() -> None:
        wait_for(begun.exists, "the login shell")
        rc.unlink()
        ssh_hosts.drop_sessions("gate")

    dropping = threading.Thread(target=drop)
    dropping.start()
    try:
        with transport("h1", ssh_hosts.environ(), first_patience_s=HANG_S) as made:
            assert made.home() == str(ssh_hosts.state / "home")
    finally:
        dropping.join()
        go.touch()


# --- The user's terminal

SESSION = """
import os, sys
from llmctl.errors import LlmctlError
from llmctl.transport.ssh import connect
made = connect(sys.argv[1], dict(os.environ))
try:
    status = made.run_interactive(sys.argv[3:], cwd=sys.argv[2])
    made.close()
    print(f"[status {status}]")
except LlmctlError as error:
    print(f"[{type(error).__name__}: {error.message}]")
"""


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Session:
    """``run_interactive`` of llmctl on a new terminal."""

    def __init__(self, environ: dict[str, str], host: str, cwd: str, *argv: str) -> None:
        self.ours, theirs = pty.openpty()
        set_size(theirs, 33, 99)
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SESSION, host, cwd, *argv],
            env={**environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        self.theirs = theirs
        self.seen = ""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        try:
            while True:
                self.seen += os.read(self.ours, 4096).decode()
        except OSError:
            return

    def sees(self, words: str) -> None:
        wait_for(lambda: words in self.seen, lambda: f"{words!r} in {self.seen!r}")

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def sees_while_typing(self, keys: str, words: str) -> None:
        """Type until the words appear: the new size may arrive after a line was read."""

        def is_seen() -> bool:
            self.type(keys)
            return words in self.seen

        wait_for(is_seen, lambda: f"{words!r} in {self.seen!r}")

    def end(self) -> None:
        self.process.wait(HANG_S)
        assert termios.tcgetattr(self.theirs) == self.before
        os.close(self.theirs)
        os.close(self.ours)


@pytest.mark.parametrize("way", ["own", "master"])
def test_a_command_on_a_real_terminal(ssh_hosts: SshHosts, tmp_path: Path, way: str) -> None:
    environ = client_environ(ssh_hosts, tmp_path, f"ControlPath {tmp_path}/cm-%n")
    script = (
        "trap 'echo caught' INT; trap 'stty size' WINCH; tty; pwd; stty size; echo $TERM; echo ready; "
        'while read -r word; do echo "got $word"; [ "$word" != end ] || exit 7; done'
    )
    with master(environ, "h1") if way == "master" else nullcontext():
        session = Session(environ, "h1", str(ssh_hosts.local), "bash", "-c", script)
        session.sees("ready")
        assert "/dev/pts/" in session.seen
        assert f"{ssh_hosts.local}\r\n33 99\r\nxterm" in session.seen
        session.type("a 'b'\n")
        session.sees("got a 'b'")
        session.type("\x03")
        session.sees("caught")
        set_size(session.theirs, 20, 70)
        os.kill(session.process.pid, signal.SIGWINCH)
        session.sees_while_typing("x\n", "20 70")
        session.type("end\n")
        session.sees("[status 7]")
        session.end()
        killed = Session(environ, "h1", "/", "bash", "-c", "kill -9 $$")
        killed.sees("[status 137]")
        killed.end()
        by_number = Session(environ, "h1", "/", "bash", "-c", "exit 255")
        by_number.sees("[status 255]")
        by_number.end()
        dropped = Session(environ, "h1", "/", "bash", "-c", "echo ready; sleep 4000")
        dropped.sees("ready")
        ssh_hosts.drop_sessions("h1")
        dropped.sees("[ConnectionLost: h1: connection lost")
        dropped.end()


def test_a_command_without_a_terminal_keeps_its_streams_apart(ssh_hosts: SshHosts) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION, "h1", "/", "sh", "-c", "cat; echo note >&2; exit 5"],
        env={**ssh_hosts.environ(), "PYTHONPATH": str(Path(__file__).parents[2])},
        input=b"line\n\xff\n" * 20_000,
        capture_output=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout == b"line\n\xff\n" * 20_000 + b"[status 5]\n"
    assert done.stderr == b"note\n"


@pytest.mark.parametrize(
    ("script", "output", "status"),
    [
        ("head -c 40000000 /dev/zero; cat >/dev/null; exit 5", b"\0" * 40_000_000, 5),
        ("head -c 6; exec <&-; exit 3", b"line\nl", 3),
    ],
    ids=["prints much before it reads", "ends before its input"],
)
def test_a_command_need_not_read_its_input_at_once(
    ssh_hosts: SshHosts, script: str, output: bytes, status: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION, "h1", "/", "sh", "-c", script],
        env={**ssh_hosts.environ(), "PYTHONPATH": str(Path(__file__).parents[2])},
        input=b"line\n" * 2_000_000,
        capture_output=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout[: len(output)] == output
    assert done.stdout[len(output) :] == f"[status {status}]\n".encode()
    assert done.stderr == b""


def test_a_connection_lost_while_input_is_sent(ssh_hosts: SshHosts) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SESSION, "h1", "/", "cat"],
        env={**ssh_hosts.environ(), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stdin = process.stdin

        def type_on() -> None:
            with suppress(BrokenPipeError), stdin:
                while True:
                    stdin.write(b"line\n" * 10_000)

        threading.Thread(target=type_on, daemon=True).start()
        assert process.stdout.read(1_000_000)[:5] == b"line\n"
        ssh_hosts.drop_sessions("gate")
        output = process.stdout.read()
        lost = b"[ConnectionLost: h1: connection lost; the command on the terminal may still run on the host"
        assert lost in output[-200:]
        assert process.stderr.read() == b""
