"""RemoteTransport over real ssh: jump hosts, keys of all kinds, and failed connections."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.ssh.master_connection import MasterConnection
from llmctl.transport.ssh.paramiko_connection import ParamikoConnection
from tests.schedulers.ssh_clients import Person, client_environ, master, refusal, transport
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts
from tests.waiting import HANG_S, wait_for

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


# --- Working connections


def test_a_host_behind_a_jump_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    with transport("h1", ssh_hosts.environ()) as made:
        done = made.run(["sh", "-c", "hostname; cat; exit 3"], timeout_s=HANG_S, stdin=b"\0\xff")
        assert (done.exit_status, done.stdout) == (3, "h1\n\0\ufffd")
        assert made.home() == str(ssh_hosts.state / "home")
        assert made.inspect_processes([]).host == "h1"
        names = [str(ssh_hosts.local / f"rank-{rank}.log") for rank in range(64)]
        made.write_files([FileWrite(name, name.encode() * 5000) for name in names])
        assert made._agent is not None
        before = made._agent._number
        assert [part.data for part in made.read_parts([FileRead(n, 0, 50) for n in names])] == [
            (name.encode() * 5000)[:50] for name in names
        ]
        assert made._agent._number == before + 1, "all files in one round trip"
        assert len(list(ssh_hosts.local_of("h1").glob("rank-*"))) == 64
        (tmp_path / "program").write_bytes(os.urandom(3_000_000))
        (tmp_path / "program").chmod(0o755)
        made.put_tree(str(ssh_hosts.local / "code"), {"a/program": tmp_path / "program"})
        sent = ssh_hosts.local_of("h1") / "code" / "a" / "program"
        assert sent.read_bytes() == (tmp_path / "program").read_bytes()
        assert sent.stat().st_mode & 0o777 == 0o755
        assert not list(ssh_hosts.local_of("h1").glob(".*"))
    assert "Starting session: subsystem 'sftp' for root" in (ssh_hosts.state / "log" / "sshd.h1.log").read_text()
    wait_for(lambda: not ssh_hosts.processes("llmctl-agent"), "the end of the agent")


def test_a_proxy_command_and_the_profiles_own_jump_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    through = f"Host {ssh_hosts.address('h2')}\n  ProxyCommand ssh -W [%h]:%p gate"
    with transport(ssh_hosts.address("h2"), client_environ(ssh_hosts, tmp_path, through, without="ProxyJump")) as made:
        assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h2\n"
    from llmctl.transport.ssh import connect

    plain = client_environ(ssh_hosts, tmp_path, without="ProxyJump")
    made = connect("h2", plain, proxy_jump="gate")
    assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h2\n"
    made.close()


def test_a_running_control_master_is_used_and_left_running(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    path = f"ControlPath {tmp_path}/cm-%n"
    environ = client_environ(ssh_hosts, tmp_path / "user", path)
    # Without a key, a connection can only come through the ControlMaster.
    keyless = client_environ(ssh_hosts, tmp_path / "keyless", path, without="IdentityFile")
    assert "refused user root" in refusal("h1", keyless, transient=False)
    with master(environ, "h1"):
        (tmp_path / "file").write_bytes(os.urandom(1_000_000))
        with transport("h1", keyless) as made:
            assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h1\n"
            assert isinstance(made._connection, MasterConnection)
            made._connection.send_file((tmp_path / "file").open("rb"), str(ssh_hosts.local / "sent"))
            assert (ssh_hosts.local_of("h1") / "sent").read_bytes() == (tmp_path / "file").read_bytes()
            made.put_tree(str(ssh_hosts.local / "by-master"), {"file": tmp_path / "file"})
            sent = ssh_hosts.local_of("h1") / "by-master" / "file"
            assert sent.read_bytes() == (tmp_path / "file").read_bytes()
        check = ["ssh", "-O", "check", "h1"]
        assert subprocess.run(check, env=environ, check=False, capture_output=True).returncode == 0


def test_the_control_master_of_a_jump_host_is_used(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    path = f"ControlPath {tmp_path}/cm-%n"
    lines = (path, "Host h1", f"  IdentityFile {ssh_hosts.key}")
    behind = client_environ(ssh_hosts, tmp_path / "behind", *lines, without="IdentityFile")
    assert "gate: the host refused user root" in refusal("h1", behind, transient=False)
    with master(client_environ(ssh_hosts, tmp_path / "user", path), "gate"), transport("h1", behind) as made:
        assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h1\n"
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
        wait_for(lambda: ssh_hosts._listens("h3"), "sshd")
        (tmp_path / "file").write_bytes(os.urandom(9_000_000))
        with transport("h3", ssh_hosts.environ()) as made:
            made.put_tree(str(ssh_hosts.local / "code"), {"file": tmp_path / "file"})
            assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h3\n"
        assert (ssh_hosts.local_of("h3") / "code" / "file").read_bytes() == (tmp_path / "file").read_bytes()
    finally:
        rc.unlink()
        ssh_hosts.stop_sshd("h3")
        ssh_hosts.start_sshd("h3")


# --- Authentication and host keys


def test_an_unknown_host_key_is_never_accepted(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("".join(line for line in ssh_hosts.known_hosts.open() if not line.startswith("h2")))
    before = known.read_text()
    environ = client_environ(ssh_hosts, tmp_path / "c", f"UserKnownHostsFile {known}", "StrictHostKeyChecking no")
    message = refusal("h2", environ, transient=False)
    shown = subprocess.run(
        ["ssh-keygen", "-lf", f"{ssh_hosts.state}/keys/h2.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert message.startswith(f"h2: its host key is unknown: ED25519 {shown}\nrun `ssh h2` once")
    assert known.read_text() == before


def test_a_changed_host_key_is_refused_with_file_and_line(ssh_hosts: SshHosts) -> None:
    ssh_hosts.rekey("h2")
    try:
        message = refusal("h2", ssh_hosts.environ(), transient=False)
    finally:
        ssh_hosts.undo_rekey("h2")
    assert f"h2: ITS HOST KEY HAS CHANGED: {ssh_hosts.known_hosts} line 3" in message
    assert "may be an attack" in message


def test_a_hashed_entry_an_alias_and_the_key_type_that_is_known(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    text = ssh_hosts.known_hosts.read_text().splitlines()
    alias = [f"mine {line.split(' ', 1)[1]}" for line in text if line.startswith("h1,")]
    known.write_text("\n".join([*alias, *(line for line in text if not line.startswith("h1,"))]) + "\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(known)], check=True, capture_output=True)
    lines = ("Host h1", "  HostKeyAlias mine", "Host *", f"  UserKnownHostsFile {known}")
    with transport("h1", client_environ(ssh_hosts, tmp_path / "c", *lines)) as made:
        assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h1\n"


def test_a_key_that_is_not_accepted(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    environ = client_environ(ssh_hosts, tmp_path / "c", f"IdentityFile {key}", without=str(ssh_hosts.key))
    message = refusal("gate", environ, transient=False)
    assert message.startswith(f"gate: the host refused user root; it accepts publickey; tried key {key}\n")


def test_an_encrypted_key_is_asked_for_once(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    key = tmp_path / "encrypted"
    shutil.copy(ssh_hosts.key, key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", str(key)], check=True, capture_output=True)
    environ = client_environ(ssh_hosts, tmp_path / "c", f"IdentityFile {key}", without=str(ssh_hosts.key))
    assert "encrypted, and no terminal to ask on: add the key to the agent with ssh-add" in refusal(
        "h1", environ, transient=False
    )
    person = Person((f"Enter passphrase for key '{key}': ", "open sesame"))
    with transport("h1", environ, person.terminal) as made:
        # Two hosts on the route, one question, and no further question after the connection was lost.
        assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h1\n"
        ssh_hosts.drop_sessions("gate")
        assert made.list_names(["/nonexistent"]) == [[]]
        assert made.warnings[-1].startswith("reconnected to h1")
    assert (person.seen.count("Enter passphrase"), person.unused) == (1, [])
    assert "open sesame" not in person.seen
    person.leave()


def test_keys_of_the_agent(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    socket = str(tmp_path / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: Path(socket).exists(), "ssh-agent")
        for number in range(3):
            other = tmp_path / f"other{number}"
            subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(other)], check=True)
            add = ["ssh-add", "-q", str(other)]
            subprocess.run(add, env={**os.environ, "SSH_AUTH_SOCK": socket}, check=True)
        subprocess.run(["ssh-add", "-q", str(ssh_hosts.key)], env={**os.environ, "SSH_AUTH_SOCK": socket}, check=True)
        lines = ("Host *", "  IdentitiesOnly no", "  IdentityAgent SSH_AUTH_SOCK")
        environ = client_environ(ssh_hosts, tmp_path / "c", *lines, without="IdentityFile", SSH_AUTH_SOCK=socket)
        with transport("h1", environ) as made:
            assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h1\n"
    finally:
        agent.terminate()
        agent.wait(HANG_S)


@pytest.fixture
def asking_host(ssh_hosts: SshHosts) -> SshHosts:
    """h4 requires a key, and then a password by keyboard-interactive from PAM."""
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


def test_a_code_after_the_key_is_asked_for_once_and_never_on_a_reconnect(asking_host: SshHosts) -> None:
    environ = asking_host.environ()
    message = refusal("h4", environ, transient=False)
    assert "it accepts keyboard-interactive" in message
    assert "there is no terminal: log in beforehand, with `ssh -fNM h4`" in message
    person = Person(("(root@10.98.3.4) Password: ", "wrong"), ("Password: ", "s3cret"))
    with transport("h4", environ, person.terminal) as made:
        assert made.run(["hostname"], timeout_s=HANG_S).stdout == "h4\n"
        assert person.unused == []
        asked = person.seen.count("Password")
        asking_host.drop_sessions("h4")
        with pytest.raises(SchedulerError, match="asks for a password or code again; llmctl asks only") as caught:
            made.list_names(["/"])
        assert caught.value.transient
        assert person.seen.count("Password") == asked
    assert "s3cret" not in person.seen
    person.leave()
