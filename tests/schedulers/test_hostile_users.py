"""Several users of one folder of runs on a real Slurm: alice attacks a job of bob that waits, carol runs hers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbeds.slurm_cluster import SlurmCluster, slurm_cluster
from tests.testbeds.slurm_conf import USERS
from tests.waiting import HANG_S, wait_for

__all__ = ["slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ALICE, BOB, CAROL = USERS


@dataclass(frozen=True)
class Shared:
    """A folder of runs that all users of the cluster may write to, and their homes."""

    cluster: SlurmCluster
    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    def home(self, user: str) -> Path:
        return self.folder / user

    def prepare(self) -> None:
        """Make the folder of the runs, which belongs to alice, and a home with a profile for each user."""
        self.folder.chmod(0o755)
        self.root.mkdir()
        os.chown(self.root, USERS[ALICE], -1)
        self.root.chmod(0o1777)
        profile = {"scheduler": "slurm", "runs_root": str(self.root), "defaults": {"queue": "debug"}}
        for user, uid in USERS.items():
            clusters = self.home(user) / ".config/llmctl/clusters"
            clusters.mkdir(parents=True)
            (clusters / "bed.yaml").write_text(yaml.safe_dump(profile))
            # A job that waits in the queue until it is released.
            (clusters / "held.yaml").write_text(yaml.safe_dump({**profile, "options": ["--hold"]}))
            for path in (self.home(user), *self.home(user).rglob("*")):
                os.chown(path, uid, uid)

    def run(self, user: str, *argv: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of a user on the login node."""
        uid = USERS[user]
        environ = {**self.cluster.environ(), "HOME": str(self.home(user)), "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            self.cluster.entered_login("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *argv),
            env=environ, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip

    def llmctl(self, user: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run(user, sys.executable, "-m", "llmctl.cli.main", *arguments)

    def submit(self, user: str, run_id: str, *, cluster: str = "bed") -> str:
        """Submit a job that writes its user's name; returns its id."""
        command = f"id -un >> {self.home(user)}/{run_id}"
        done = self.llmctl(user, "submit", "--cluster", cluster, "--run-id", run_id, "--", "bash", "-c", command)
        assert done.returncode == 0, done.stderr
        return str(self.status(user, run_id)["job_ids"][-1])

    def status(self, user: str, run_id: str) -> dict[str, Any]:
        done = self.llmctl(user, "status", run_id, "--json")
        assert done.returncode == 0, done.stderr
        (run,) = json.loads(done.stdout)["runs"]
        return dict(run)

    def ended(self, user: str, run_id: str) -> dict[str, Any]:
        wait_for(lambda: self.status(user, run_id)["state"] not in ("pending", "running"), f"the end of {run_id}")
        return self.status(user, run_id)

    def ran_as(self, user: str, run_id: str) -> str:
        witness = self.home(user) / run_id
        return witness.read_text() if witness.exists() else ""


@pytest.fixture(scope="module")
def shared(slurm_cluster: SlurmCluster) -> Iterator[Shared]:
    shared = Shared(slurm_cluster, slurm_cluster.state / "shared")
    shared.folder.mkdir()
    shared.prepare()
    probe = shared.run(BOB, sys.executable, "-c", "import llmctl.cli.main, yaml, jinja2, pydantic, typer")
    if probe.returncode != 0:
        pytest.skip(f"other users cannot read this Python or checkout: {probe.stderr.strip()[-200:]}")
    yield shared
    for user, uid in USERS.items():
        shared.run(user, "scancel", f"--user={user}")
        # Locks of the users' jobs on their ports.
        shutil.rmtree(f"/tmp/llmctl-ports-{uid}", ignore_errors=True)


def test_code_that_was_planted_while_a_job_waited_is_not_run(shared: Shared) -> None:
    job_id = shared.submit(BOB, "waits", cluster="held")
    own = shared.root / f".llmctl-{USERS[BOB]}"
    planted = shared.home(ALICE) / "ran"
    address = (shared.root / "waits/code/supervisor").resolve().parent.name
    program = f"import os; open({str(planted)!r}, 'a').write(str(os.getuid()))"
    attack = (
        f"mv {own} {own}.away && mkdir -p {own}/code/{address}/supervisor && "
        f"echo {program!r} > {own}/code/{address}/supervisor/__main__.py && touch {planted} && chmod 0666 {planted} && "
        f"chmod 0755 {shared.home(ALICE)}"
    )
    done = shared.run(ALICE, "bash", "-c", attack.replace(f"{program!r}", f'"{program}"'))
    assert done.returncode == 0, done.stderr
    shared.cluster.run("scontrol", "release", job_id)
    run = shared.ended(BOB, "waits")
    assert run["state"] == "failed" and f"is of {ALICE}" in run["detail"], run
    assert planted.read_text() == "" and shared.ran_as(BOB, "waits") == ""
    refused = shared.llmctl(BOB, "resume", "waits")
    assert refused.returncode == 5 and f"belongs to {ALICE}, not to you" in refused.stderr, refused.stderr
    assert shared.run(ALICE, "bash", "-c", f"rm -r {own} && mv {own}.away {own}").returncode == 0
    assert shared.llmctl(BOB, "resume", "waits").returncode == 0
    shared.cluster.run("scontrol", "release", str(shared.status(BOB, "waits")["job_ids"][-1]))
    assert shared.ended(BOB, "waits")["state"] == "completed"
    assert shared.ran_as(BOB, "waits") == f"{BOB}\n"


def test_a_run_in_the_place_of_bobs_is_not_resumed_and_carol_runs_hers(shared: Shared) -> None:
    for user in (ALICE, BOB, CAROL):
        shared.submit(user, f"of-{user}")
    for user in (ALICE, BOB, CAROL):
        assert shared.ended(user, f"of-{user}")["state"] == "completed"
        assert shared.ran_as(user, f"of-{user}") == f"{user}\n"
    hers, his = shared.root / f"of-{ALICE}", shared.root / f"of-{BOB}"
    swap = f"mv {his} {his}.away && cp -r {hers} {his} && sed -i s/of-{ALICE}/of-{BOB}/ {his}/run.json"
    swap += f" && chmod -R 0755 {his}"
    assert shared.run(ALICE, "bash", "-c", swap).returncode == 0
    for arguments in (("resume",), ("cancel",), ("interactive", "--run")):
        done = shared.llmctl(BOB, *arguments, f"of-{BOB}", *(("--", "true") if "--run" in arguments else ()))
        assert done.returncode == 5 and f"{his} belongs to {ALICE}, not to you" in done.stderr, done.stderr
    assert f"a run of {ALICE}" in shared.status(BOB, f"of-{BOB}")["detail"]
    assert shared.ran_as(BOB, f"of-{BOB}") == f"{BOB}\n"


def test_bob_can_cancel_his_waiting_job_although_alice_has_taken_its_folder(shared: Shared) -> None:
    jobs = {user: shared.submit(user, f"held-of-{user}", cluster="held") for user in (ALICE, BOB)}
    hers, his = shared.root / f"held-of-{ALICE}", shared.root / f"held-of-{BOB}"
    swap = f"mv {his} {his}.away && cp -r {hers} {his} && sed -i s/held-of-{ALICE}/held-of-{BOB}/ {his}/run.json"
    assert shared.run(ALICE, "bash", "-c", f"{swap} && chmod -R 0755 {his}").returncode == 0
    done = shared.llmctl(BOB, "cancel", f"held-of-{BOB}")
    assert done.returncode == 0 and f"held-of-{BOB}: ended its job {jobs[BOB]}; " in done.stdout, done
    assert f"{his} belongs to {ALICE}, not to you" in done.stdout, done
    waiting = shared.cluster.run("squeue", "--noheader", "--format=%i").split()
    assert jobs[ALICE] in waiting and jobs[BOB] not in waiting
    assert 'cancel_requested": null' in (his / "run.json").read_text(), "alice's file stays as she made it"
    assert shared.llmctl(ALICE, "cancel", hers.name).returncode == 0
