"""Hands over real ssh: hosts behind a jump host, keys of all kinds, and every way in which a connection can fail."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.file_acts import FileWrite
from llmctl.file_reads import FileRead
from llmctl.remote.failures import ConnectionLost
from llmctl.remote.master_connection import MasterConnection
from llmctl.remote.paramiko_connection import ParamikoConnection
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts, wait_for

from .ssh_clients import Person, client_environ, hands_on

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@contextmanager
def hands(*args, **options):
    made = hands_on(*args, **options)
    try:
        yield made
    finally:
        made.close()


def refusal(host: str, environ: dict[str, str], *, transient: bool, **options: object) -> str:
    """What is said of a host that cannot be used."""
    with hands(host, environ, **options) as made, pytest.raises(SchedulerError) as caught:
        made.home()
    assert caught.value.transient is transient, caught.value.message
    assert len(caught.value.message.splitlines()) <= 2
    return caught.value.message


# --- What works


def test_a_host_behind_a_jump_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    with hands("h1", ssh_hosts.environ()) as made:
        done = made.run(["sh", "-c", "hostname; cat; exit 3"], timeout_s=10, stdin=b"\0\xff")
        assert (done.exit_status, done.stdout) == (3, "h1\n\0\ufffd")
        assert made.home() == str(ssh_hosts.state / "home")
        assert made.inspect_processes([]).host == "h1"
        names = [str(ssh_hosts.local / f"rank-{rank}.log") for rank in range(64)]
        made.write_files([FileWrite(name, name.encode() * 5000) for name in names])
        began = time.monotonic()
        assert [part.data for part in made.read_parts([FileRead(n, 0, 50) for n in names])] == [
            (name.encode() * 5000)[:50] for name in names
        ]
        assert time.monotonic() - began < 2
        assert len(list(ssh_hosts.local_of("h1").glob("rank-*"))) == 64
        (tmp_path / "program").write_bytes(os.urandom(3_000_000))
        (tmp_path / "program").chmod(0o755)
        made.put_tree(str(ssh_hosts.local / "code"), {"a/program": tmp_path / "program"})
        sent = ssh_hosts.local_of("h1") / "code" / "a" / "program"
        assert sent.read_bytes() == (tmp_path / "program").read_bytes()
        assert sent.stat().st_mode & 0o777 == 0o755
        assert not list(ssh_hosts.local_of("h1").glob(".*"))
    assert "Starting session: subsystem 'sftp' for root" in (ssh_hosts.state / "log" / "sshd.h1.log").read_text()
    wait_for(lambda: not ssh_hosts.processes("llmctl-agent"), 10, "the end of the agent")


def test_a_proxy_command_and_the_profiles_own_jump_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    through = f"Host {ssh_hosts.address('h2')}\n  ProxyCommand ssh -W [%h]:%p gate"
    with hands(ssh_hosts.address("h2"), client_environ(ssh_hosts, tmp_path, through, without="ProxyJump")) as made:
        assert made.run(["hostname"], timeout_s=10).stdout == "h2\n"
    from llmctl.remote import connect

    plain = client_environ(ssh_hosts, tmp_path, without="ProxyJump")
    made = connect("h2", plain, proxy_jump="gate")
    assert made.run(["hostname"], timeout_s=10).stdout == "h2\n"
    made.close()


@contextmanager
def master(environ: dict[str, str], host: str):
    subprocess.run(["ssh", "-fNM", host], env=environ, check=True, timeout=20, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(["ssh", "-O", "exit", host], env=environ, check=False, timeout=20, capture_output=True)


def test_a_running_control_master_is_used_and_left_running(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    path = f"ControlPath {tmp_path}/cm-%n"
    environ = client_environ(ssh_hosts, tmp_path / "user", path)
    # Without a key: what gets in has come through the master.
    keyless = client_environ(ssh_hosts, tmp_path / "keyless", path, without="IdentityFile")
    assert "does not let root in" in refusal("h1", keyless, transient=False)
    with master(environ, "h1"):
        (tmp_path / "file").write_bytes(os.urandom(1_000_000))
        with hands("h1", keyless) as made:
            assert made.run(["hostname"], timeout_s=10).stdout == "h1\n"
            assert isinstance(made._connection, MasterConnection)
            made._connection.sftp().close()
            made.put_tree(str(ssh_hosts.local / "by-master"), {"file": tmp_path / "file"})
            sent = ssh_hosts.local_of("h1") / "by-master" / "file"
            assert sent.read_bytes() == (tmp_path / "file").read_bytes()
        check = ["ssh", "-O", "check", "h1"]
        assert subprocess.run(check, env=environ, check=False, capture_output=True).returncode == 0


def test_the_control_master_of_a_jump_host_is_used(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    path = f"ControlPath {tmp_path}/cm-%n"
    lines = (path, "Host h1", f"  IdentityFile {ssh_hosts.key}")
    behind = client_environ(ssh_hosts, tmp_path / "behind", *lines, without="IdentityFile")
    assert "gate: the host does not let root in" in refusal("h1", behind, transient=False)
    with master(client_environ(ssh_hosts, tmp_path / "user", path), "gate"), hands("h1", behind) as made:
        assert made.run(["hostname"], timeout_s=10).stdout == "h1\n"
        assert isinstance(made._connection, ParamikoConnection)


def test_a_login_shell_that_prints_and_a_host_without_sftp(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    rc = ssh_hosts.state / "home" / ".bashrc"
    rc.write_text("echo 'Welcome to the cluster'; printf 'no line end'; echo noise >&2\n")
    ssh_hosts.stop_sshd("h3")
    config = ssh_hosts.state / "etc" / "sshd_config.bare"
    own = (ssh_hosts.state / "etc" / "sshd_config.h3").read_text()
    config.write_text("".join(line for line in own.splitlines(keepends=True) if "Subsystem" not in line))
    key = str(ssh_hosts.state / "keys" / "h3")
    ssh_hosts.on_host("h3", "/usr/sbin/sshd", "-f", str(config), "-h", key, "-E", str(tmp_path / "log"))
    try:
        wait_for(lambda: ssh_hosts._listens("h3"), 10, "sshd")
        (tmp_path / "file").write_bytes(os.urandom(9_000_000))
        with hands("h3", ssh_hosts.environ()) as made:
            made.put_tree(str(ssh_hosts.local / "code"), {"file": tmp_path / "file"})
            assert made.run(["hostname"], timeout_s=10).stdout == "h3\n"
        assert (ssh_hosts.local_of("h3") / "code" / "file").read_bytes() == (tmp_path / "file").read_bytes()
    finally:
        rc.unlink()
        ssh_hosts.stop_sshd("h3")
        ssh_hosts.start_sshd("h3")


# --- Who may come in


def test_an_unknown_host_key_is_never_taken(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("".join(line for line in ssh_hosts.known_hosts.open() if not line.startswith("h2")))
    before = known.read_text()
    environ = client_environ(ssh_hosts, tmp_path / "c", f"UserKnownHostsFile {known}", "StrictHostKeyChecking no")
    told = refusal("h2", environ, transient=False)
    shown = subprocess.run(
        ["ssh-keygen", "-lf", f"{ssh_hosts.state}/keys/h2.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert told.startswith(f"h2: its host key is not known here: ED25519 {shown}\nrun `ssh h2` once")
    assert known.read_text() == before


def test_a_changed_host_key_is_refused_with_file_and_line(ssh_hosts: SshHosts) -> None:
    ssh_hosts.rekey("h2")
    try:
        told = refusal("h2", ssh_hosts.environ(), transient=False)
    finally:
        ssh_hosts.undo_rekey("h2")
    assert f"h2: ITS HOST KEY HAS CHANGED: {ssh_hosts.known_hosts} line 3" in told
    assert "may be an attack" in told


def test_a_hashed_entry_an_alias_and_the_key_type_that_is_known(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    text = ssh_hosts.known_hosts.read_text().splitlines()
    alias = [f"mine {line.split(' ', 1)[1]}" for line in text if line.startswith("h1,")]
    known.write_text("\n".join([*alias, *(line for line in text if not line.startswith("h1,"))]) + "\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(known)], check=True, capture_output=True)
    lines = ("Host h1", "  HostKeyAlias mine", "Host *", f"  UserKnownHostsFile {known}")
    with hands("h1", client_environ(ssh_hosts, tmp_path / "c", *lines)) as made:
        assert made.run(["hostname"], timeout_s=10).stdout == "h1\n"


def test_a_key_that_is_not_accepted(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    environ = client_environ(ssh_hosts, tmp_path / "c", f"IdentityFile {key}", without=str(ssh_hosts.key))
    told = refusal("gate", environ, transient=False)
    assert told.startswith(f"gate: the host does not let root in; it takes publickey; tried key {key}\n")


def test_an_encrypted_key_is_asked_for_once(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    key = tmp_path / "encrypted"
    shutil.copy(ssh_hosts.key, key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", str(key)], check=True, capture_output=True)
    environ = client_environ(ssh_hosts, tmp_path / "c", f"IdentityFile {key}", without=str(ssh_hosts.key))
    assert "encrypted, and nobody to ask: add it to the agent with ssh-add" in refusal("h1", environ, transient=False)
    person = Person((f"Enter passphrase for key '{key}': ", "open sesame"))
    with hands("h1", environ, person.terminal) as made:
        # Two hosts on the way, one question; and none again after the connection was lost.
        assert made.run(["hostname"], timeout_s=10).stdout == "h1\n"
        ssh_hosts.drop_sessions("gate")
        assert made.list_names(["/nonexistent"]) == [[]]
        assert made.remarks[-1].startswith("reconnected to h1")
    assert (person.seen.count("Enter passphrase"), person.unused) == (1, [])
    assert "open sesame" not in person.seen
    person.leave()


def test_keys_of_the_agent(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    socket = str(tmp_path / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: Path(socket).exists(), 10, "ssh-agent")
        for number in range(3):
            other = tmp_path / f"other{number}"
            subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(other)], check=True)
            add = ["ssh-add", "-q", str(other)]
            subprocess.run(add, env={**os.environ, "SSH_AUTH_SOCK": socket}, check=True)
        subprocess.run(["ssh-add", "-q", str(ssh_hosts.key)], env={**os.environ, "SSH_AUTH_SOCK": socket}, check=True)
        lines = ("Host *", "  IdentitiesOnly no", "  IdentityAgent SSH_AUTH_SOCK")
        environ = client_environ(ssh_hosts, tmp_path / "c", *lines, without="IdentityFile", SSH_AUTH_SOCK=socket)
        with hands("h1", environ) as made:
            assert made.run(["hostname"], timeout_s=10).stdout == "h1\n"
    finally:
        agent.terminate()
        agent.wait(10)


@pytest.fixture
def asking_host(ssh_hosts: SshHosts) -> SshHosts:
    """h4 wants a key, and then a password by keyboard-interactive from PAM."""
    folder = ssh_hosts.state / "pam"
    folder.mkdir(exist_ok=True)
    hashed = subprocess.run(["openssl", "passwd", "-6", "s3cret"], capture_output=True, text=True, check=True).stdout
    (folder / "shadow").write_text(f"root:{hashed.strip()}:19000:0:99999:7:::\n")
    (folder / "sshd").write_text(
        "auth required pam_unix.so\naccount required pam_permit.so\nsession required pam_permit.so\n"
    )
    ssh_hosts.on_host("h4", "mount", "--bind", str(folder / "shadow"), "/etc/shadow")
    ssh_hosts.on_host("h4", "mount", "--bind", str(folder / "sshd"), "/etc/pam.d/sshd")
    ssh_hosts.stop_sshd("h4")
    ssh_hosts.start_sshd(
        "h4",
        "UsePAM yes",
        "PermitRootLogin yes",
        "KbdInteractiveAuthentication yes",
        "AuthenticationMethods publickey,keyboard-interactive",
    )
    yield ssh_hosts
    ssh_hosts.stop_sshd("h4")
    ssh_hosts.on_host("h4", "umount", "/etc/shadow")
    ssh_hosts.on_host("h4", "umount", "/etc/pam.d/sshd")
    ssh_hosts.start_sshd("h4")


def test_a_code_on_top_of_the_key_is_asked_for_once_and_never_in_the_middle(asking_host: SshHosts) -> None:
    environ = asking_host.environ()
    told = refusal("h4", environ, transient=False)
    assert "it takes keyboard-interactive" in told
    assert "there is no terminal: log in beforehand, with `ssh -fNM h4`" in told
    person = Person(("(root@10.98.3.4) Password: ", "wrong"), ("Password: ", "s3cret"))
    with hands("h4", environ, person.terminal) as made:
        assert made.run(["hostname"], timeout_s=10).stdout == "h4\n"
        assert person.unused == []
        asked = person.seen.count("Password")
        asking_host.drop_sessions("h4")
        with pytest.raises(SchedulerError, match="asks for a password or code again; llmctl asks only") as caught:
            made.list_names(["/"])
        assert caught.value.transient
        assert person.seen.count("Password") == asked
    assert "s3cret" not in person.seen
    person.leave()


# --- What goes wrong on the way


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
        assert "h3: the jump host gate cannot reach it (10.98.3.3 port 22): " in told
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
    import socket

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
    with hands("gate", environ) as direct, hands("h2", environ) as behind, hands("h1", environ) as through:
        for made in (direct, behind, through):
            made.write_files([FileWrite(str(log), b"abcdef")])
        ssh_hosts.cut_network("h2")
        threads = [threading.Thread(target=lost, args=(behind, found, "behind"))]
        threads[0].start()
        threads[0].join(45)
        ssh_hosts.heal_network("h2")
        assert 5 < found["behind"] < 30
        # Looking goes on by itself, and says what has happened.
        assert behind.read_parts([FileRead(str(log), 2)])[0].data == b"cdef"
        assert behind.remarks[0] == "connection to h2 lost; connecting again"
        assert behind.remarks[1].startswith("reconnected to h2 after ")
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
        assert through.remarks[0] == "connection to h1 lost; connecting again"
        assert through.remarks[1].startswith("reconnected to h1 after ")
    wait_for(lambda: not ssh_hosts.processes("sleep 70"), 40, "the end of commands that nobody waits for")


def test_an_ended_session_and_jobs_that_live_on(ssh_hosts: SshHosts) -> None:
    with hands("h2", ssh_hosts.environ()) as made:
        job = made.start_detached(["sleep", "50"], cwd="/", log=str(ssh_hosts.local / "job.log"))
        timer = threading.Timer(0.5, ssh_hosts.drop_sessions, ["h2"])
        timer.start()
        with pytest.raises(ConnectionLost, match="h2: connection lost while `sleep` ran; whether it was done"):
            made.run(["sleep", "30"], timeout_s=40)
        timer.join()
        assert made.inspect_processes([job]).alive == (True,)
        assert "sleep 30" not in " ".join(sum(ssh_hosts.processes("sleep").values(), []))
        made.run(["kill", str(job.pid)], timeout_s=10)
        wait_for(lambda: made.inspect_processes([job]).alive == (False,), 10, "the job's end")


# --- A person's terminal

SESSION = """
import os, sys
from llmctl.errors import LlmctlError
from llmctl.remote import connect
made = connect(sys.argv[1], dict(os.environ))
try:
    status = made.run_interactive(sys.argv[3:], cwd=sys.argv[2])
    made.close()
    print(f"[status {status}]")
except LlmctlError as error:
    print(f"[{type(error).__name__}: {error.message}]")
"""


class Session:
    """llmctl on a terminal of its own, as far as ``run_interactive`` goes."""

    def __init__(self, environ: dict[str, str], host: str, cwd: str, *argv: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (33, 99))
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
        wait_for(lambda: words in self.seen, patience_s, f"{words!r} in {self.seen!r}")

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def end(self) -> None:
        self.process.wait(20)
        assert termios.tcgetattr(self.theirs) == self.before
        os.close(self.theirs)
        os.close(self.ours)


@pytest.mark.parametrize("way", ["own", "master"])
def test_a_command_on_a_real_terminal(ssh_hosts: SshHosts, tmp_path: Path, way: str) -> None:
    environ = client_environ(ssh_hosts, tmp_path, f"ControlPath {tmp_path}/cm-%n")
    if way == "master":
        subprocess.run(["ssh", "-fNM", "h1"], env=environ, check=True, timeout=20, stderr=subprocess.DEVNULL)
    script = (
        "trap 'echo caught' INT; trap 'stty size' WINCH; tty; pwd; stty size; echo $TERM; echo ready; "
        'while read -r word; do echo "got $word"; [ "$word" != end ] || exit 7; done'
    )
    try:
        session = Session(environ, "h1", str(ssh_hosts.local), "bash", "-c", script)
        session.sees("ready")
        assert "/dev/pts/" in session.seen
        assert f"{ssh_hosts.local}\r\n33 99\r\nxterm" in session.seen
        session.type("a 'b'\n")
        session.sees("got a 'b'")
        session.type("\x03")
        session.sees("caught")
        termios.tcsetwinsize(session.theirs, (20, 70))
        os.kill(session.process.pid, signal.SIGWINCH)
        session.type("x\n")
        session.sees("20 70")
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
    finally:
        if way == "master":
            subprocess.run(["ssh", "-O", "exit", "h1"], env=environ, check=False, capture_output=True)


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
