"""A real Grid Engine cluster on this machine, for root; see sge_up.sh."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.waiting import HANG_S

PROGRAMS = (
    *("/usr/lib/gridengine/sge_qmaster", "/usr/lib/gridengine/sge_execd", "/usr/lib/gridengine/qsub"),
    *("/usr/lib/gridengine/spoolinit", "ip", "nsenter", "perl", "unshare"),
)
SCRIPTS = Path(__file__).parent
LOGIN = "es1"


class SgeCluster:
    """The cluster.

    Attributes:
        state: folder of all its files.
        hosts: names of the execution hosts.
        groups: the groups (projects) that jobs can be billed to.
    """

    def __init__(self, state: Path, *, hosts: int = 4) -> None:
        self.state = state
        self.hosts = tuple(f"g{number:04d}" for number in range(1, hosts + 1))
        self.groups = ("gaa50001", "gaa50002")

    def start(self) -> None:
        """Start all hosts; after a failure nothing is left."""
        done = subprocess.run(
            ["bash", SCRIPTS / "sge_up.sh", self.state, str(len(self.hosts))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            env=_without_session(os.environ),
        )
        if done.returncode != 0:
            self.stop()
            raise RuntimeError(f"sge_up.sh left with {done.returncode}: {done.stderr[-2000:]}")

    def stop(self) -> None:
        """End every process of every host, and with them their networks."""
        subprocess.run(["bash", SCRIPTS / "sge_down.sh", self.state], timeout=HANG_S, check=True)

    def argv(self, *command: str, host: str = LOGIN) -> list[str]:
        """Command prefix for a host; TESTBED_KEEP names the variables of our environment to pass on."""
        return [str(self.state / "on"), host, *command]

    def environ(self) -> dict[str, str]:
        """Environment without the user's variables; a host sets its own."""
        return {}

    def run(self, *command: str, host: str = LOGIN) -> str:
        """Run a command on a host to its end; return its output."""
        done = subprocess.run(
            self.argv(*command, host=host), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=HANG_S, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def configure(self, key: str, value: str) -> None:
        """Set one line of the global configuration."""
        # The file must have the name of the configuration.
        file = self.state / "conf" / "global"
        lines = self.run("qconf", "-sconf").splitlines()
        file.write_text("".join(f"{key} {value}\n" if line.split()[:1] == [key] else f"{line}\n" for line in lines))
        output = self.run("qconf", "-Mconf", str(file))
        assert "modified" in output, output

    def cut_power(self, host: str) -> None:
        """Kill every process of a host at once, without notice to the other hosts."""
        subprocess.run([self.state / "power-cut", host], check=True, timeout=HANG_S)

    def restore_power(self, host: str) -> None:
        """Start the host again, without any jobs."""
        subprocess.run(
            [self.state / "power-on", host], check=True, timeout=HANG_S, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=_without_session(os.environ),
        )  # fmt: skip

    def processes(self, word: str) -> list[str]:
        """Processes of all hosts with a word in their environment, as ``pid command``."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if word.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(f"{folder.name} {(folder / 'cmdline').read_text(errors='replace')}")
            except OSError:
                continue
        return found


def _without_session(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of our environment that reach a newly started host."""
    return {name: environ[name] for name in ("PATH", "LANG", "HOME") if name in environ}


def missing_programs() -> list[str]:
    """Required programs that are not installed on this machine."""
    return [Path(program).name for program in PROGRAMS if shutil.which(program) is None]


@pytest.fixture(scope="session")
def sge_cluster() -> Iterator[SgeCluster]:
    """One cluster for all tests of a session; skips them if it cannot be started."""
    if os.geteuid() != 0:
        pytest.skip("real Grid Engine needs root")
    if missing_programs():
        pytest.skip(f"real Grid Engine needs {', '.join(missing_programs())}")
    with tempfile.TemporaryDirectory(prefix="llmctl-sge-") as folder:
        Path(folder).chmod(0o755)
        cluster = SgeCluster(Path(folder) / "testbed")
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
