"""A real Slurm cluster on this machine, for root: a login node and compute nodes.

The login node runs the controller and the accounting. Every machine is a set of namespaces with a separate network,
host name and process ids. The login node's network is private too, so that a cluster's ports, interfaces and addresses
cannot collide with those of another cluster or of this machine. The end of one process ends the whole cluster; the
kernel does so even if the tests are killed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.testbeds.hostile_users import LAB, USERS
from tests.testbeds.slurm_conf import DATABASE, LOGIN, NETWORK, SLURM_CONF, SLURMDBD_CONF
from tests.waiting import HANG_S, wait_for

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "ip", "nsenter", "setpriv")
_SEARCHED = "/usr/sbin:/usr/bin:/sbin:/bin"


class SlurmCluster:
    """The cluster. ``start`` starts all machines, ``stop`` removes everything.

    Attributes:
        state: folder of all its files.
        nodes: names of the compute nodes.
    """

    def __init__(
        self,
        state: Path,
        *,
        nodes: int = 4,
        gpus: int = 2,
        cpus: int = 8,
        memory_mib: int = 8000,
        min_job_age_s: int = 300,
    ) -> None:
        self.state = state
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._gpus, self._cpus, self._memory_mib, self._min_job_age_s = gpus, cpus, memory_mib, min_job_age_s
        self._machines: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    # --- Start and stop

    def start(self) -> None:
        """Start all machines; after a failure nothing is left."""
        try:
            self._write_files()
            self._start_machine(LOGIN)
            self._prepare_network()
            self._start_munge()
            self._start_database()
            for name in self.nodes:
                self._start_machine(name)
                self._connect(name)
            self.start_accounting()
            self._register()
            self.daemon("slurmctld", "slurmctld")
            wait_for(lambda: self.call("scontrol", "ping").returncode == 0, "slurmctld")
            for name in self.nodes:
                self.start_slurmd(name)
            wait_for(
                lambda: (
                    self.run("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D").strip() == f"{len(self.nodes)}"
                ),
                "nodes",
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process, and with them network and mounts."""
        for name in (*self.nodes, LOGIN):
            self._kill_machine(name)

    # --- Actions of tests

    def argv(self, *command: str) -> list[str]:
        """Argv that runs ``command`` on the login node, with this machine's files."""
        return [
            "nsenter",
            f"--net=/proc/{self.pid_of(LOGIN)}/ns/net",
            f"--uts=/proc/{self.pid_of(LOGIN)}/ns/uts",
            "--",
            *command,
        ]

    def entered_login(self, *command: str) -> list[str]:
        """Argv that runs ``command`` on the login node, with its files, such as its users."""
        return self._entered(LOGIN, *command)

    def environ(self) -> dict[str, str]:
        """Further environment variables of a user on the login node."""
        return {"SLURM_CONF": str(self.state / "slurm.conf"), "PATH": f"{_SEARCHED}:{os.environ['PATH']}"}

    def call(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on the login node; any exit status is accepted."""
        return subprocess.run(
            self.argv(*command),
            env={**os.environ, **self.environ()},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def run(self, *command: str) -> str:
        """Run a command on the login node that must succeed; its output."""
        done = self.call(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def on_node(self, name: str, *command: str) -> str:
        """Run a command on a machine, as root."""
        argv = self._entered(name, *command)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0, f"{name}: {' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def cut_power(self, name: str) -> None:
        """Cut the node's link, so that peers get no FIN or RST, and kill its processes."""
        self.run("ip", "link", "del", f"to-{name}")
        self._kill_machine(name)

    def restore_power(self, name: str) -> None:
        """Start a killed node again."""
        self._start_machine(name)
        self._connect(name)
        self.start_slurmd(name)

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a node, which finds the jobs of the one before."""
        (self.state / "spool" / name).mkdir(exist_ok=True)
        self.daemon(f"slurmd-{name}", "slurmd", "-N", name, machine=name)

    def drain(self, name: str, reason: str) -> None:
        """Take a node out of service."""
        self.run("scontrol", "update", f"nodename={name}", "state=drain", f"reason={reason}")

    def resume(self, name: str) -> None:
        """Put a node back into service."""
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def load_plugins(self, lines: str) -> None:
        """Write plugstack.conf, which srun, sbatch and the step's daemon read each time."""
        (self.state / "plugstack.conf").write_text(lines)

    def forget_jobs_after(self, seconds: int) -> None:
        """Set the time for which the queue keeps ended jobs; it checks once a minute."""
        self._configure("MinJobAge", seconds)

    def kill_after(self, seconds: int) -> None:
        """Set the time from SIGTERM to SIGKILL for jobs at their limit."""
        self._configure("KillWait", seconds)

    @contextlib.contextmanager
    def prolog(self, lines: str) -> Iterator[None]:
        """Let these lines run before the script of a job, on each node."""
        script, conf = self.state / "prolog.sh", self.state / "slurm.conf"
        script.write_text(f"#!/bin/bash\n{lines}")
        script.chmod(0o755)
        before = conf.read_text()
        conf.write_text(f"{before}Prolog={script}\n")
        self.run("scontrol", "reconfigure")
        try:
            yield
        finally:
            conf.write_text(before)
            self.run("scontrol", "reconfigure")

    def _configure(self, key: str, seconds: int) -> None:
        path = self.state / "slurm.conf"
        path.write_text(re.sub(rf"\b{key}=\d+", f"{key}={seconds}", path.read_text()))
        self.run("scontrol", "reconfigure")

    def start_accounting(self) -> None:
        """Start slurmdbd."""
        self.daemon("slurmdbd", "slurmdbd")
        wait_for(lambda: self.call("sacctmgr", "-n", "show", "cluster").returncode == 0, "slurmdbd")

    def stop_accounting(self) -> None:
        """End slurmdbd; the controller keeps its records until slurmdbd is back."""
        pid_file = self.state / "run" / "slurmdbd.pid"
        self.on_node(LOGIN, "kill", pid_file.read_text().strip())
        wait_for(lambda: self.call("sacctmgr", "-n", "show", "cluster").returncode != 0, "the end of slurmdbd")

    def processes(self, needle: str) -> list[str]:
        """Command lines of all processes on compute nodes whose environment holds ``needle``."""
        spaces = {
            (Path("/proc") / str(self.pid_of(name)) / "ns" / "pid").readlink()
            for name in self.nodes
            if name in self._machines
        }
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (folder / "environ").read_bytes()
                if (folder / "ns" / "pid").readlink() in spaces and needle.encode() in environ:
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    # --- Set-up

    def _write_files(self) -> None:
        for folder in ("log", "ctld", "spool", "run", "db", "dev", "machines"):
            (self.state / folder).mkdir(parents=True)
        (self.state / "run").chmod(0o777)
        addresses = [f"{NETWORK}.{number} {name}" for number, name in enumerate(self.nodes, 1)]
        self._write("hosts", "\n".join(["127.0.0.1 localhost", f"{NETWORK}.254 {LOGIN}", *addresses, ""]))
        self._write("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")
        self._write("resolv.conf", "")
        passwd = [f"{user}:x:{uid}:{uid}::/nonexistent:/bin/bash\n" for user, uid in USERS.items()]
        self._write("passwd", Path("/etc/passwd").read_text() + "".join(passwd))
        groups = [f"{user}:x:{uid}:\n" for user, uid in USERS.items()]
        lab = f"lab:x:{LAB}:{','.join(USERS)}\n"
        self._write("group", Path("/etc/group").read_text() + "".join(groups) + lab)
        self._write("plugstack.conf", "")
        self._write("cgroup.conf", "CgroupPlugin=cgroup/v1\n")
        names = f"n[1-{len(self.nodes)}]" if len(self.nodes) > 1 else "n1"
        gres = f"Gres=gpu:{self._gpus} " if self._gpus else ""
        size = f"CPUs={self._cpus} RealMemory={self._memory_mib} {gres}State=UNKNOWN"
        lines = [f"NodeName={name} NodeAddr={NETWORK}.{number} {size}" for number, name in enumerate(self.nodes, 1)]
        values = {"state": self.state, "network": NETWORK, "login": LOGIN, "names": names, "nodes": "\n".join(lines)}
        self._write("slurm.conf", SLURM_CONF.format(**values, min_job_age_s=self._min_job_age_s))
        self._write("slurmdbd.conf", SLURMDBD_CONF.format(state=self.state), mode=0o600)
        # Copies of /dev/null: Slurm sets CUDA_VISIBLE_DEVICES only for character devices.
        for number in range(self._gpus):
            os.mknod(self.state / "dev" / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        last = f"[0-{self._gpus - 1}]" if self._gpus > 1 else "0"
        self._write(
            "gres.conf", f"NodeName={names} Name=gpu File={self.state}/dev/nvidia{last}\n" if self._gpus else ""
        )
        self._write("munge.key", os.urandom(64).hex(), mode=0o600)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        (self.state / name).write_text(text)
        (self.state / name).chmod(mode)

    def _start_machine(self, name: str) -> None:
        (self.state / "machines" / name).unlink(missing_ok=True)
        init = str(Path(__file__).parent / "slurm_node.sh")
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        # The kernel ends the machine together with the tests, even if the tests are killed.
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, init, name, str(self.state)]
        with (self.state / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._machines[name] = process, 0
        wait_for((self.state / "machines" / name).exists, f"machine {name}")
        self._machines[name] = process, _child_of(process.pid)

    def _kill_machine(self, name: str) -> None:
        if name not in self._machines:
            return
        process, pid = self._machines.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or process.pid, 9)
        process.wait(20)

    def _entered(self, name: str, *command: str) -> list[str]:
        """Argv that runs ``command`` on a machine."""
        return ["nsenter", f"--target={self.pid_of(name)}", "--net", "--uts", "--mount", "--pid", "--", *command]

    def pid_of(self, name: str) -> int:
        """Pid of a machine's first process, as this machine sees it."""
        return self._machines[name][1]

    def _prepare_network(self) -> None:
        for words in ("link add nodes type bridge", f"addr add {NETWORK}.254/24 dev nodes", "link set nodes up"):
            self.run("ip", *words.split())

    def _connect(self, name: str) -> None:
        number = self.nodes.index(name) + 1
        # A fixed address, so that the other nodes' ARP entries stay valid when the node starts again.
        peer = ["peer", "name", "eth0", "address", f"02:98:01:00:00:{number:02x}", "netns", str(self.pid_of(name))]
        self.run("ip", "link", "add", f"to-{name}", "type", "veth", *peer)
        self.run("ip", "link", "set", f"to-{name}", "master", "nodes", "up")
        self.on_node(name, "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        self.on_node(name, "ip", "link", "set", "eth0", "up")

    def daemon(self, log: str, *argv: str, machine: str = LOGIN) -> None:
        """Start a daemon that goes to the background itself, with a log file as its output."""
        with (self.state / "log" / f"{log}.start.log").open("ab") as output:
            done = subprocess.run(
                self._entered(machine, *argv),
                env={**os.environ, **self.environ()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=HANG_S,
                check=False,
            )
        assert done.returncode == 0, f"{argv[0]}: {(self.state / 'log' / f'{log}.start.log').read_text()}"

    def _start_munge(self) -> None:
        run = self.state / "run"
        places = [
            "--socket",
            f"{run}/munge.sock",
            "--pid-file",
            f"{run}/munged.pid",
            "--seed-file",
            f"{run}/munge.seed",
        ]
        self.daemon(
            "munged",
            "munged",
            "--force",
            "--key-file",
            f"{self.state}/munge.key",
            *places,
            "--log-file",
            f"{self.state}/log/munged.log",
        )

    def _start_database(self) -> None:
        data, socket, scratch = self.state / "db", self.state / "run" / "db.sock", self.state / "db-scratch"
        # Its files are named after the process id, which two clusters may share: not in /tmp.
        scratch.mkdir()
        for folder in (data, scratch):
            shutil.chown(folder, "mysql")
        self.daemon(
            "mariadb-install-db",
            "mariadb-install-db",
            "--no-defaults",
            "--user=mysql",
            f"--datadir={data}",
            f"--tmpdir={scratch}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
        )
        small = [
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=8M",
            "--innodb-flush-log-at-trx-commit=0",
            "--performance-schema=OFF",
            "--key-buffer-size=1M",
        ]
        places = [
            f"--datadir={data}",
            f"--tmpdir={scratch}",
            f"--socket={socket}",
            f"--pid-file={data}/db.pid",
            "--bind-address=127.0.0.1",
            "--port=13306",
        ]
        command = ["mariadbd", "--no-defaults", "--user=mysql", *places, "--skip-name-resolve", *small]
        self.daemon("mariadbd", "bash", "-c", 'setsid "$@" &', "bash", *command)
        client = ("mariadb", "--no-defaults", f"--socket={socket}", "-uroot", "-e")
        wait_for(lambda: self.call(*client, "select 1").returncode == 0, "mariadbd")
        self.run(*client, DATABASE)

    def _register(self) -> None:
        self.run("sacctmgr", "-i", "add", "cluster", "testbed")
        self.run("sacctmgr", "-i", "add", "account", "test", "Description=test", "Organization=test")
        self.run("sacctmgr", "-i", "add", "user", "root", "Account=test")


def _child_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    assert len(children) == 1, f"process {parent} has the children {children}"
    return int(children[0])


def missing_programs() -> Sequence[str]:
    """Required programs that are not installed on this machine."""
    return [program for program in PROGRAMS if shutil.which(program, path=_SEARCHED) is None]


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """One cluster for all tests of a session; skips them if it cannot be started."""
    if os.geteuid() != 0:
        pytest.skip("real Slurm needs root")
    if missing_programs():
        pytest.skip(f"real Slurm needs {', '.join(missing_programs())}")
    # Socket paths have at most 108 characters, so pytest's own folder may be too deep.
    with tempfile.TemporaryDirectory(prefix="llmctl-slurm-") as folder:
        Path(folder).chmod(0o755)
        cluster = SlurmCluster(Path(folder))
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
