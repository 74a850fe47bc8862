"""``llmctl doctor`` and ``clusters validate`` over real ssh: a login node, and machines without a scheduler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.llmctl.doctor.test_parsers import FACTS
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts
from tests.waiting import HANG_S

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


class User:
    """A user with a separate home, on the machine that reaches the hosts."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self._environ = {
            **hosts.environ(),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self._clusters = folder / "config/llmctl/clusters"
        self._clusters.mkdir(parents=True)

    def llmctl(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "llmctl.cli.main", *words]
        return subprocess.run(
            command, cwd=ROOT, env=self._environ, capture_output=True, text=True, timeout=HANG_S, check=False
        )

    def profile(self, **values: object) -> None:
        (self._clusters / "lab.yaml").write_text(json.dumps({"environment": {"python": sys.executable}, **values}))

    def doctor(self) -> tuple[int, dict[str, dict[str, str]]]:
        done = self.llmctl("doctor", "--cluster", "lab", "--json")
        assert done.stdout, done.stderr
        return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.fixture
def quick_python(ssh_hosts: SshHosts) -> str:
    """Stand-in for the jobs' Python, which every machine sees: passes all checks of the doctor at once."""
    path = ssh_hosts.shared / "quick-python"
    path.write_text(f"#!/bin/sh\necho '==llmctl-python== {json.dumps(FACTS)}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def user(ssh_hosts: SshHosts, tmp_path: Path) -> User:
    return User(ssh_hosts, tmp_path)


def test_a_login_node_is_examined_through_one_connection(user: User, ssh_hosts: SshHosts) -> None:
    runs = ssh_hosts.shared / "doctor-runs"
    user.profile(scheduler="slurm", login={"host": "h1"}, runs_root=str(runs))
    code, checks = user.doctor()
    assert checks["connection"]["detail"].startswith("h1, ")
    assert checks["python"]["state"] == checks["torch"]["state"] == "ok"
    assert checks["runs_root"]["detail"].startswith(f"{runs}, ")
    assert checks["clock"]["state"] == "ok"
    # Slurm's commands may be installed on this machine, but no controller runs on this host.
    assert checks["scheduler"]["state"] == "FAULT"
    assert code == 4
    assert not runs.exists()


def test_a_profile_is_validated_where_its_jobs_run(user: User, ssh_hosts: SshHosts) -> None:
    user.profile(scheduler="slurm", login={"host": "h1"}, runs_root=str(ssh_hosts.shared / "runs"))
    done = user.llmctl("clusters", "validate", "lab")
    assert (done.returncode, done.stdout) == (0, "lab: valid\n"), done.stderr
    user.profile(scheduler="slurm", login={"host": "h1"}, runs_root="/proc/version/runs")
    done = user.llmctl("clusters", "validate", "lab")
    assert done.returncode == 3
    assert "/proc/version" in done.stderr


def test_a_shared_folder_is_detected(user: User, ssh_hosts: SshHosts, quick_python: str) -> None:
    shared = ssh_hosts.shared / "doctor-shared"
    shared.mkdir(exist_ok=True)
    user.profile(scheduler="ssh", hosts=["h1", "h2"], runs_root=str(shared), environment={"python": quick_python})
    code, checks = user.doctor()
    assert checks["shared"]["state"] == checks["host h1"]["state"] == checks["host h2"]["state"] == "ok"
    assert code == 0
    user.profile(
        scheduler="ssh", hosts=["h1", "h2"], runs_root=str(ssh_hosts.local), environment={"python": quick_python}
    )
    code, checks = user.doctor()
    assert checks["shared"]["state"] == "FAULT"
    assert "shared: false" in checks["shared"]["remedy"]
    assert code == 3


def test_a_machine_that_is_down_or_lacks_the_environment_is_named(
    user: User, ssh_hosts: SshHosts, quick_python: str
) -> None:
    user.profile(
        scheduler="ssh", hosts=["h1", "h3"], runs_root=str(ssh_hosts.shared), environment={"python": quick_python}
    )
    ssh_hosts.stop_sshd("h3")
    try:
        code, checks = user.doctor()
    finally:
        ssh_hosts.start_sshd("h3")
    assert checks["host h1"]["state"] == "ok"
    assert checks["host h3"]["state"] == "FAULT"
    assert checks["host h3"]["remedy"].startswith("ssh h3")
    assert code == 4
    user.profile(
        scheduler="ssh", hosts=["h1"], runs_root=str(ssh_hosts.shared), environment={"python": "/no/such/python"}
    )
    code, checks = user.doctor()
    assert "/no/such/python does not exist" in checks["host h1"]["detail"]
    assert code == 3
