"""A real sshd on the login node of the test's Slurm cluster, behind a jump host.

The sshd processes live in the login node's namespaces and end with it. One link, with a name and addresses for this run
only, leads to the jump host; the login node itself listens on the cluster's private network only. Root's home on the
login node is a folder of the test, and only the login shell has Slurm in its PATH, as on sites with a Slurm module.
"""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

from tests.testbeds.slurm_cluster import SlurmCluster
from tests.testbeds.slurm_conf import LOGIN, NETWORK
from tests.waiting import wait_for

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "pgrep")
_SEARCHED = "/usr/sbin:/usr/bin:/sbin:/bin"

_SSHD_CONFIG = """\
ListenAddress {address}
Port 22
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile {state}/authorized_keys
StrictModes no
UseDNS no
Subsystem sftp internal-sftp
PidFile {state}/{name}.pid
LogLevel VERBOSE
"""

_CLIENT = """\
Host jump
  HostName {jump}
Host hpc
  HostName {login}
  ProxyJump jump
Host *
  User root
  IdentityFile {state}/id_ed25519
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {state}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ConnectTimeout 5
"""


class LoginNode:
    """Access to a Slurm cluster from another machine. Ends with the cluster; ``stop`` removes the link.

    Attributes:
        cluster: cluster of the login node.
        state: folder of everything that is written.
        home: root's home on the login node.
        bin: first folder of the login shell's PATH.
        link: name of our end of the link.
    """

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.state = cluster.state / "ssh"
        self.home, self.bin = self.state / "home", self.state / "login-bin"
        self.link = f"lll{secrets.token_hex(4)}"
        block = f"198.19.{secrets.randbelow(256)}"
        fourth = 4 * secrets.randbelow(64)
        self._outside, self._jump = f"{block}.{fourth + 1}", f"{block}.{fourth + 2}"

    def start(self) -> None:
        """Start the access to the running cluster."""
        for folder in (self.home, self.bin, self.state / "client"):
            folder.mkdir(parents=True)
        self._set_home()
        self.set_login_lines("")
        self._make_link()
        for name in ("user", "jump", "login"):
            key = self.state / ("id_ed25519" if name == "user" else name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        shutil.copy(self.state / "id_ed25519.pub", self.state / "authorized_keys")
        addresses = {"jump": self._jump, "login": f"{NETWORK}.254"}
        known = ""
        for name, address in addresses.items():
            known += f"{address} {' '.join((self.state / f'{name}.pub').read_text().split()[:2])}\n"
            self._start_sshd(name, address)
        (self.state / "known_hosts").write_text(known)
        self.config = self.state / "ssh_config"
        self.config.write_text(_CLIENT.format(state=self.state, **addresses))
        ssh = self.state / "client" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=_SEARCHED)} -F {self.config} "$@"\n')
        ssh.chmod(0o755)

    def stop(self) -> None:
        """Remove the link, unless it has ended with the cluster."""
        subprocess.run(["ip", "link", "del", self.link], capture_output=True, check=False)

    def environ(self) -> dict[str, str]:
        """Environment of a laptop without Slurm, in which ``ssh`` knows the login node as ``hpc``."""
        return {**os.environ, "PATH": f"{self.state / 'client'}:{os.environ['PATH']}"}

    def set_login_lines(self, *lines: str) -> None:
        """Set further lines of root's .bash_profile on the login node."""
        environment = f"export SLURM_CONF={self.cluster.state}/slurm.conf\nexport PATH={self.bin}:{_SEARCHED}\n"
        (self.home / ".bash_profile").write_text(environment + "".join(f"{line}\n" for line in lines))

    def drop_sessions(self) -> int:
        """Kill every ssh session and its processes at once; return the number of processes."""
        keep = {(self.state / f"{name}.pid").read_text().strip() for name in ("jump", "login")}
        pids = set(self.cluster.on_node(LOGIN, "sh", "-c", "pgrep -x sshd || true").split()) - keep
        self.cluster.on_node(LOGIN, "sh", "-c", f"kill -9 {' '.join(pids)} 2>/dev/null; true")
        return len(pids)

    def _set_home(self) -> None:
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        own = [[*user[:5], str(self.home), "/bin/bash"] if user[0] == "root" else user for user in users]
        (self.state / "passwd").write_text("".join(":".join(user) + "\n" for user in own))
        self.cluster.on_node(LOGIN, "mount", "--bind", str(self.state / "passwd"), "/etc/passwd")

    def _make_link(self) -> None:
        pid = str(self.cluster.pid_of(LOGIN))
        for words in (
            f"link add {self.link} type veth peer name outside netns {pid}",
            f"addr add {self._outside}/30 dev {self.link}",
            f"link set {self.link} up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        for words in (f"addr add {self._jump}/30 dev outside", "link set outside up"):
            self.cluster.on_node(LOGIN, "ip", *words.split())

    def _start_sshd(self, name: str, address: str) -> None:
        config = self.state / f"sshd_config.{name}"
        config.write_text(_SSHD_CONFIG.format(address=address, state=self.state, name=name))
        self.cluster.on_node(LOGIN, "mkdir", "-p", "/run/sshd")
        # The daemon must not inherit the environment of the tests.
        clean = ["env", "-i", f"PATH={_SEARCHED}"]
        keys = ("-f", str(config), "-h", str(self.state / name), "-E", str(self.state / f"{name}.log"))
        self.cluster.daemon(f"sshd-{name}", *clean, "/usr/sbin/sshd", *keys, machine=LOGIN)
        wait_for((self.state / f"{name}.pid").exists, f"sshd {name}")


def missing_programs() -> list[str]:
    """Required programs that are not installed on this machine."""
    return [program for program in PROGRAMS if shutil.which(program, path=_SEARCHED) is None]
