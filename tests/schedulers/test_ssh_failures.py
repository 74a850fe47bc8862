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
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.ssh.failures import ConnectionLost
from tests.schedulers.ssh_clients import client_environ, master, refusal, transport
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts
from tests.testbeds.waiting import wait_for

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


# --- Failures on the route


def test_hosts_that_are_not_there(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    environ = client_environ(
        ssh_hosts, tmp_path, "Host unused", "  HostName 127.0.0.1", "  Port 1", "Host silent", "  HostName 127.0.0.1"
    )
    assert "unused (127.0.0.1): nothing listens on port 1; is its sshd down?" in refusal(
        "unused", environ, transient=True, first_patience_s=0.5
    )
    assert "there is no host of this name" in refusal("no-such-host.invalid", environ, transient=False)
    ssh_hosts.stop_sshd("h3")
    try:
        told = refusal("h3", environ, transient=True, first_patience_s=0.5)
        assert "h3: the jump host gate cannot reach the host (10.98.3.3 port 22): " in told
    finally:
        ssh_hosts.start_sshd("h3")
    ssh_hosts.cut_network("h3")
    try:
        began = time.monotonic()
        told = refusal("h3", environ, transient=True, first_patience_s=0.5)
        assert "h3: not reached through the jump host gate within 5 s" in told
        assert time.monotonic() - began < 12
    finally:
        ssh_hosts.heal_network("h3")


def test_a_port_that_is_no_ssh_server(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad\r\n" * 200), daemon=True).start()
        environ = client_environ(ssh_hosts, tmp_path, "Host web", "  HostName 127.0.0.1", f"  Port {port}")
        assert f"web: no ssh connection to 127.0.0.1 port {port}: " in refusal(
            "web", environ, transient=True, first_patience_s=0.1
        )


def lost(made: object, found: dict[str, float], name: str) -> None:
    began = time.monotonic()
    try:
        made.run(["sleep", "70"], timeout_s=80)  # type: ignore[attr-defined]
    except ConnectionLost:
        found[name] = time.monotonic() - began


def test_a_cut_network_is_noticed_in_front_of_the_jump_host_and_behind_it(ssh_hosts: SshHosts) -> None:
    environ, found = ssh_hosts.environ(), {}
    log = ssh_hosts.local / "log"
    with transport("gate", environ) as direct, transport("h2", environ) as behind, transport("h1", environ) as through:
        for made in (direct, behind, through):
            made.write_files([FileWrite(str(log), b"abcdef")])
        ssh_hosts.cut_network("h2")
        threads = [threading.Thread(target=lost, args=(behind, found, "behind"))]
        threads[0].start()
        threads[0].join(45)
        ssh_hosts.heal_network("h2")
        assert 5 < found["behind"] < 30
        # A call that only reads is repeated on a new connection, with a warning.
        assert behind.read_parts([FileRead(str(log), 2)])[0].data == b"cdef"
        assert behind.warnings[0] == "connection to h2 lost; reconnecting"
        assert behind.warnings[1].startswith("reconnected to h2 after ")
        ssh_hosts.cut_network("gate")
        threads = [threading.Thread(target=lost, args=(direct, found, "direct"))]
        threads[0].start()
        healing = threading.Timer(32, ssh_hosts.heal_network, ["gate"])
        healing.start()
        began = time.monotonic()
        assert through.read_parts([FileRead(str(log), 3)])[0].data == b"def"
        assert 25 < time.monotonic() - began < 60
        healing.join()
        threads[0].join(10)
        assert 5 < found["direct"] < 30
        assert through.warnings[0] == "connection to h1 lost; reconnecting"
        assert through.warnings[1].startswith("reconnected to h1 after ")
    wait_for(lambda: not ssh_hosts.processes("sleep 70"), 40, "the end of commands that nobody waits for")


def test_an_ended_session_and_jobs_that_live_on(ssh_hosts: SshHosts) -> None:
    with transport("h2", ssh_hosts.environ()) as made:
        job = made.start_detached(["sleep", "50"], cwd="/", log=str(ssh_hosts.local / "job.log"))
        timer = threading.Timer(0.5, ssh_hosts.drop_sessions, ["h2"])
        timer.start()
        with pytest.raises(ConnectionLost, match="h2: connection lost while `sleep` ran; the outcome is unknown"):
            made.run(["sleep", "30"], timeout_s=40)
        timer.join()
        assert made.inspect_processes([job]).alive == (True,)
        assert "sleep 30" not in " ".join(sum(ssh_hosts.processes("sleep").values(), []))
        made.run(["kill", str(job.pid)], timeout_s=10)
        wait_for(lambda: made.inspect_processes([job]).alive == (False,), 10, "the job's end")


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
    """``run_interactive`` of llmctl on a terminal of its own."""

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

    def sees(self, words: str, patience_s: float = 20) -> None:
        wait_for(lambda: words in self.seen, patience_s, lambda: f"{words!r} in {self.seen!r}")

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def sees_while_typing(self, keys: str, words: str) -> None:
        """Type repeatedly: bash runs a trap after the line that it reads, and the new size may come after that line."""

        def is_seen() -> bool:
            self.type(keys)
            return words in self.seen

        wait_for(is_seen, 20, lambda: f"{words!r} in {self.seen!r}")

    def end(self) -> None:
        self.process.wait(20)
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
        dropped = Session(environ, "h1", "/", "bash", "-c", "echo ready; sleep 40")
        dropped.sees("ready")
        ssh_hosts.drop_sessions("h1")
        dropped.sees("[ConnectionLost: h1: connection lost")
        dropped.end()


def test_a_command_without_a_terminal_keeps_its_streams_apart(ssh_hosts: SshHosts) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION, "h1", "/", "sh", "-c", "cat; echo told >&2; exit 5"],
        env={**ssh_hosts.environ(), "PYTHONPATH": str(Path(__file__).parents[2])},
        input=b"line\n\xff\n" * 20_000,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == b"line\n\xff\n" * 20_000 + b"[status 5]\n"
    assert done.stderr == b"told\n"
