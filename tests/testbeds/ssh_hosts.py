"""Real sshd hosts on this machine, for root: h1 to hN behind the jump host ``gate``.

Every machine is a set of namespaces with a separate network, host name and process ids. The tests reach only
gate, over one link with a name and addresses for this run only. The kernel ends all machines together with the tests,
even if the tests are killed. All machines see the same files, except for a different folder ``local`` on each machine.

    hosts.environ()          the environment of an ssh client (and of llmctl) that knows these hosts by their names
    hosts.shared             a folder that all machines see
    hosts.local              a path with a different folder on each machine; see also ``local_of``
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import HANG_S, wait_for

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "iptables", "nsenter", "unshare", "setpriv")
GATE = "gate"
NETWORK = "10.98.3"
"""Network of the hosts; exists inside the namespaces only, so that two runs do not collide."""
_SEARCHED = "/usr/sbin:/usr/bin:/sbin:/bin"
_SPACES = (("net", "net"), ("uts", "uts"), ("mount", "mnt"), ("pid", "pid"))

_SSHD_CONFIG = """\
Port 22
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile {state}/authorized_keys
StrictModes no
UseDNS no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
PidFile /run/sshd.pid
LogLevel VERBOSE
"""

_CLIENT = """\
Host *
  User root
  IdentityFile {state}/id_ed25519
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {state}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ConnectTimeout 5
  ServerAliveInterval 2
  ServerAliveCountMax 3
"""


class SshHosts:
    """The machines. ``start`` starts them, ``stop`` removes everything.

    Attributes:
        state: folder of all files.
        names: of the hosts, without the gate.
        shared: a folder that all machines, and this one, see.
        local: a path with a different folder on each machine.
        config: the client's configuration, for ``ssh -F``.
        known_hosts: the client's list of host keys.
        key: the client's private key.
    """

    def __init__(self, state: Path, *, hosts: int = 4) -> None:
        self.state = state
        self.names = tuple(f"h{number}" for number in range(1, hosts + 1))
        self.shared, self.local = state / "shared", state / "local"
        self.config, self.known_hosts, self.key = state / "ssh_config", state / "known_hosts", state / "id_ed25519"
        self._link = f"lls{secrets.token_hex(4)}"
        self._outside, self._gate_address = "", ""
        self._machines: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    # --- Start and stop

    def start(self) -> None:
        """Start all machines; after a failure nothing is left."""
        try:
            self._write_files()
            self._start_machine(GATE)
            self._link_to_gate()
            self._write_clients()
            for name in self.names:
                self._start_machine(name)
                self._connect(name)
            for name in (GATE, *self.names):
                self.start_sshd(name)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process, and with them networks and mounts."""
        for name in (*self.names, GATE):
            self._kill_machine(name)
        _call("ip", "link", "del", self._link)

    # --- For clients

    def environ(self) -> dict[str, str]:
        """Our own environment, in which ``ssh`` is the real ssh with these hosts' configuration."""
        return {**os.environ, "PATH": f"{self.state / 'bin'}:{os.environ['PATH']}"}

    def address(self, name: str) -> str:
        """IPv4 address of a machine; for the gate, the address on our link."""
        return self._gate_address if name == GATE else f"{NETWORK}.{self.names.index(name) + 1}"

    def local_of(self, name: str) -> Path:
        """Path on this machine of a host's folder ``local``."""
        return self.state / f"local.{name}"

    # --- Actions of tests

    def on_host(self, name: str, *command: str) -> str:
        """Run a command on a machine as root, without ssh; it must succeed."""
        flags = [f"--{kind}=/proc/{self._machines[name][1]}/ns/{space}" for kind, space in _SPACES]
        return _run("nsenter", *flags, "--", *command)

    def cut_network(self, name: str) -> None:
        """Drop all packets from and to a machine: its peers get no reply."""
        for chain in ("INPUT", "OUTPUT"):
            self.on_host(name, "iptables", "-I", chain, "!", {"INPUT": "-i", "OUTPUT": "-o"}[chain], "lo", "-j", "DROP")

    def heal_network(self, name: str) -> None:
        """Undo ``cut_network``."""
        self.on_host(name, "iptables", "-F")

    def cut_power(self, name: str) -> None:
        """Cut the host's link, so that peers get no FIN or RST, and kill its processes."""
        self.on_host(GATE, "ip", "link", "del", f"to-{name}")
        self._kill_machine(name)

    def restore_power(self, name: str) -> None:
        """Start a killed host again."""
        self._start_machine(name)
        self._connect(name)
        self.start_sshd(name)

    def stop_sshd(self, name: str) -> None:
        """Stop sshd: the machine and its sessions keep running, but port 22 refuses connections."""
        self.on_host(name, "sh", "-c", "kill $(cat /run/sshd.pid)")
        wait_for(lambda: not self._listens(name), f"the end of sshd on {name}")

    def start_sshd(self, name: str, *lines: str) -> None:
        """Start sshd; ``lines`` go before its usual configuration (the first value of a key counts)."""
        config = self.state / "etc" / f"sshd_config.{name}"
        config.write_text("".join(f"{line}\n" for line in lines) + _SSHD_CONFIG.format(state=self.state))
        log = str(self.state / "log" / f"sshd.{name}.log")
        # The daemon must not inherit the environment of the tests.
        clean = ["env", "-i", f"PATH={_SEARCHED}"]
        self.on_host(name, *clean, "/usr/sbin/sshd", "-f", str(config), "-h", str(self._host_key(name)), "-E", log)
        wait_for(lambda: self._listens(name), f"sshd on {name}")

    def drop_sessions(self, name: str) -> None:
        """End every ssh session of a machine; detached processes and sshd itself keep running."""
        self.on_host(
            name, "sh", "-c", "for p in $(pgrep -x sshd); do [ $p = $(cat /run/sshd.pid) ] || kill -9 $p; done"
        )

    def rekey(self, name: str) -> None:
        """Give a machine a new host key: known_hosts no longer matches."""
        self.stop_sshd(name)
        for path in (self._host_key(name), Path(f"{self._host_key(name)}.pub")):
            path.rename(f"{path}.before")
        self._make_key(self._host_key(name), name)
        self.start_sshd(name)

    def undo_rekey(self, name: str) -> None:
        """Give a machine its first host key back."""
        self.stop_sshd(name)
        for path in (self._host_key(name), Path(f"{self._host_key(name)}.pub")):
            Path(f"{path}.before").rename(path)
        self.start_sshd(name)

    def processes(self, needle: str) -> dict[str, list[str]]:
        """Host -> command lines of its processes with ``needle`` in the command line or the environment."""
        spaces = {
            (Path("/proc") / str(pid) / "ns" / "pid").readlink(): name for name, (_, pid) in self._machines.items()
        }
        found: dict[str, list[str]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name = spaces.get((folder / "ns" / "pid").readlink())
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                if name and command and needle.encode() in (folder / "environ").read_bytes() + command:
                    found.setdefault(name, []).append(command.decode(errors="replace"))
        return found

    # --- Set-up

    def _write_files(self) -> None:
        for folder in ("etc", "log", "keys", "home", "shared", "local", "bin"):
            (self.state / folder).mkdir(parents=True)
        addresses = [f"{NETWORK}.{number} {name}" for number, name in enumerate(self.names, 1)]
        lines = ["127.0.0.1 localhost", f"{NETWORK}.254 {GATE}", *addresses, ""]
        (self.state / "etc" / "hosts").write_text("\n".join(lines))
        (self.state / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (self.state / "etc" / "resolv.conf").write_text("")
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        at_home = [[*user[:5], str(self.state / "home"), *user[6:]] if user[0] == "root" else user for user in users]
        (self.state / "etc" / "passwd").write_text("".join(":".join(user) + "\n" for user in at_home))
        (self.state / "etc" / "ssh_config").write_text(_CLIENT.format(state=self.state))
        self._make_key(self.key, "tests")
        shutil.copy(f"{self.key}.pub", self.state / "authorized_keys")
        for name in (GATE, *self.names):
            self._make_key(self._host_key(name), name)

    def _write_clients(self) -> None:
        """Write the client's configuration: gate directly, all others through it; keys known by name and by address."""
        through = "".join(
            f"Host {name} {self.address(name)}\n  HostName {self.address(name)}\n  ProxyJump {GATE}\n"
            for name in self.names
        )
        self.config.write_text(
            f"Host {GATE}\n  HostName {self._gate_address}\n{through}{_CLIENT.format(state=self.state)}"
        )
        keys = []
        for name in (GATE, *self.names):
            kind, public = Path(f"{self._host_key(name)}.pub").read_text().split()[:2]
            keys.append(f"{name},{self.address(name)} {kind} {public}\n")
        self.known_hosts.write_text("".join(keys))
        ssh = self.state / "bin" / "ssh"
        real = shutil.which("ssh", path=_SEARCHED)
        ssh.write_text(f'#!/bin/sh\nexec {real} -F {self.config} "$@"\n')
        ssh.chmod(0o755)

    def _host_key(self, name: str) -> Path:
        return self.state / "keys" / name

    def _make_key(self, path: Path, comment: str) -> None:
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))

    def _start_machine(self, name: str) -> None:
        ready = self.state / f"up.{name}"
        ready.unlink(missing_ok=True)
        init = str(Path(__file__).parent / "ssh_node.sh")
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        # The kernel ends the machine together with the tests, even if the tests are killed.
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, init, name, str(self.state)]
        with (self.state / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._machines[name] = process, 0
        wait_for(ready.exists, f"machine {name}; see {self.state / 'log' / f'{name}.log'}")
        self._machines[name] = process, _child_of(process.pid)

    def _kill_machine(self, name: str) -> None:
        if name not in self._machines:
            return
        process, pid = self._machines.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or process.pid, 9)
        process.wait(20)

    def _link_to_gate(self) -> None:
        """Create the link to the gate, with two free addresses of the block for benchmarks (RFC 2544)."""
        pid = str(self._machines[GATE][1])
        for _ in range(20):
            third, fourth = secrets.randbelow(256), 4 * secrets.randbelow(64)
            block = f"198.18.{third}"
            if f" {block}.{fourth + 1}/" not in _run("ip", "-o", "-4", "addr", "show"):
                break
        self._outside, self._gate_address = f"{block}.{fourth + 1}", f"{block}.{fourth + 2}"
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _run("ip", "addr", "add", f"{self._outside}/30", "dev", self._link)
        _run("ip", "link", "set", self._link, "up")
        for words in (
            f"addr add {self._gate_address}/30 dev eth0",
            "link set eth0 up",
            "link add inside type bridge",
            f"addr add {NETWORK}.254/24 dev inside",
            "link set inside up",
        ):
            self.on_host(GATE, "ip", *words.split())
        # The other hosts can be reached only by logging in to the gate.
        self.on_host(GATE, "sh", "-c", "echo 0 >/proc/sys/net/ipv4/ip_forward")

    def _connect(self, name: str) -> None:
        number = self.names.index(name) + 1
        # A fixed address, so that the other hosts' ARP entries stay valid when the host starts again.
        pid, mac = self._machines[name][1], f"02:98:03:00:00:{number:02x}"
        _run(
            "ip",
            "link",
            "add",
            f"{self._link}p",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            mac,
            "netns",
            f"{pid}",
        )
        _run("ip", "link", "set", f"{self._link}p", "name", f"to-{name}", "netns", f"{self._machines[GATE][1]}")
        self.on_host(GATE, "ip", "link", "set", f"to-{name}", "master", "inside", "up")
        self.on_host(name, "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        self.on_host(name, "ip", "link", "set", "eth0", "up")

    def _listens(self, name: str) -> bool:
        # Port 22 (0x0016) in state LISTEN (0A): proc(5).
        return any(
            line.split()[1].endswith(":0016") and line.split()[3] == "0A"
            for line in self.on_host(name, "cat", "/proc/net/tcp").splitlines()[1:]
        )


def _call(*argv: str) -> "subprocess.CompletedProcess[str]":
    # A daemon keeps its standard output open, so a pipe of the tests would never end.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=HANG_S, check=False)
        output.seek(0)
        return subprocess.CompletedProcess(argv, done.returncode, output.read())


def _run(*argv: str) -> str:
    done = _call(*argv)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.returncode}\n{done.stdout}"
    return done.stdout


def _child_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    assert len(children) == 1, f"process {parent} has the children {children}"
    return int(children[0])


def missing_programs() -> Sequence[str]:
    """Required programs that are not installed on this machine."""
    return [program for program in PROGRAMS if shutil.which(program, path=_SEARCHED) is None]


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    """Four hosts behind a gate for all tests of a session; skips them if they cannot start."""
    if os.geteuid() != 0:
        pytest.skip("real sshd hosts need root")
    if missing_programs():
        pytest.skip(f"real sshd hosts need {', '.join(missing_programs())}")
    with tempfile.TemporaryDirectory(prefix="llmctl-ssh-") as folder:
        Path(folder).chmod(0o755)
        hosts = SshHosts(Path(folder))
        hosts.start()
        try:
            yield hosts
        finally:
            hosts.stop()
