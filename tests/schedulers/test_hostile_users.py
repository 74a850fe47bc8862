"""Several users of one folder of runs on a real Slurm: alice attacks jobs of bob, carol runs hers."""

import itertools
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

from tests.testbeds.hostile_users import LAB, ROOTS, UMASKS, USERS, plant_supervisor, put_back, swap_run
from tests.testbeds.slurm_cluster import SlurmCluster, slurm_cluster
from tests.waiting import HANG_S, wait_for

__all__ = ["slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ALICE, BOB, CAROL = USERS


@dataclass(frozen=True)
class Shared:
    """A folder of runs on the cluster, and the homes of its users beside it.

    Attributes:
        folder: holds all of them.
        kind: owner and mode of the folder of runs, by its name.
        umask: of all users.
    """

    cluster: SlurmCluster
    folder: Path
    kind: str
    umask: int

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    @property
    def is_private(self) -> bool:
        """True if only bob can use the folder of runs."""
        return self.kind == "0700"

    def home(self, user: str) -> Path:
        return self.folder / user

    def prepare(self) -> None:
        """Make the folder of runs, and a home with a profile for each user."""
        owner, mode = ROOTS[self.kind]
        self.root.mkdir(parents=True)
        os.chown(self.root, USERS[owner], LAB)
        self.root.chmod(mode)
        profile = {"scheduler": "slurm", "runs_root": str(self.root), "defaults": {"queue": "debug"}}
        for user, uid in USERS.items():
            clusters = self.home(user) / ".config/llmctl/clusters"
            clusters.mkdir(parents=True)
            (clusters / "bed.yaml").write_text(yaml.safe_dump(profile))
            # A job that waits in the queue until it is released.
            (clusters / "held.yaml").write_text(yaml.safe_dump({**profile, "options": ["--hold"]}))
            for path in (self.home(user), *self.home(user).rglob("*")):
                os.chown(path, uid, LAB)

    def run(self, user: str, *argv: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of a user on the login node."""
        environ = {**self.cluster.environ(), "HOME": str(self.home(user)), "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            self.cluster.entered_login("setpriv", f"--reuid={user}", f"--regid={USERS[user]}", "--init-groups", *argv),
            env=environ, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S, check=False,
            umask=self.umask,
        )  # fmt: skip

    def attack(self, user: str, script: str) -> None:
        """Run an attack of a user on bob, which nothing but a folder of bob's alone prevents."""
        done = self.run(user, "bash", "-c", script)
        if self.is_private:
            assert done.returncode != 0 and "Permission denied" in done.stderr, done
        else:
            assert done.returncode == 0, done.stderr

    def llmctl(self, user: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run(user, sys.executable, "-m", "llmctl.cli.main", *arguments)

    def submit(self, user: str, run_id: str, *, cluster: str = "bed") -> None:
        """Submit a job that writes its user's name."""
        command = f"id -un >> {self.home(user)}/{run_id}"
        done = self.llmctl(user, "submit", "--cluster", cluster, "--run-id", run_id, "--", "bash", "-c", command)
        assert done.returncode == 0, done.stderr

    def jobs(self, run_id: str) -> list[str]:
        """Ids of a run's jobs that wait or run."""
        return self.cluster.run("squeue", "--noheader", "--format=%i", f"--name={run_id}").split()

    def ended(self, user: str, run_id: str) -> dict[str, Any]:
        """Let a run's jobs run to their end; its status."""
        for job in self.jobs(run_id):
            self.cluster.call("scontrol", "release", job)
        wait_for(lambda: not self.jobs(run_id), f"the end of {run_id}")
        return self.status(user, run_id)

    def status(self, user: str, run_id: str) -> dict[str, Any]:
        done = self.llmctl(user, "status", run_id, "--json")
        assert done.returncode == 0, done.stderr
        (run,) = json.loads(done.stdout)["runs"]
        return dict(run)

    def ran_as(self, user: str, run_id: str) -> str:
        """Names that a user's jobs have written."""
        witness = self.home(user) / run_id
        return witness.read_text() if witness.exists() else ""


@pytest.fixture(
    scope="module",
    params=list(itertools.product(ROOTS, UMASKS)),
    ids=lambda place: f"{place[0]}-umask-{place[1]:03o}",
)
def shared(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Shared]:
    kind, umask = request.param
    shared = Shared(slurm_cluster, slurm_cluster.state / f"shared-{kind}-{umask:03o}", kind, umask)
    shared.prepare()
    probe = shared.run(BOB, sys.executable, "-c", "import llmctl.cli.main, yaml, jinja2, pydantic, typer")
    if probe.returncode != 0:
        pytest.skip(f"other users cannot read this Python or checkout: {probe.stderr.strip()[-200:]}")
    if kind == "2775":
        is_refused_until_alice_repairs_it(shared)
    yield shared
    for user, uid in USERS.items():
        shared.run(user, "scancel", f"--user={user}")
        # Locks of the users' jobs on their ports.
        shutil.rmtree(f"/tmp/llmctl-ports-{uid}", ignore_errors=True)


def is_refused_until_alice_repairs_it(shared: Shared) -> None:
    """Check that a group's folder without the sticky bit is not used, and that a job of its owner sets the bit."""
    done = shared.llmctl(BOB, "submit", "--cluster", "bed", "--", "true")
    assert done.returncode == 3 and f"{shared.root} has no sticky bit" in done.stderr, done.stderr
    assert f"Ask {ALICE} for: chmod +t {shared.root}" in done.stderr, done.stderr
    assert list(shared.root.iterdir()) == []
    shared.submit(ALICE, "first")
    assert shared.root.stat().st_mode & 0o7777 == 0o3775


def test_code_that_was_planted_while_a_job_waited_is_not_run(shared: Shared) -> None:
    shared.submit(BOB, "waits", cluster="held")
    attacker = ALICE
    if shared.kind == "2775":
        # In a group's folder everybody can do so, once its owner has removed the sticky bit.
        attacker = CAROL
        shared.attack(ALICE, f"chmod -t {shared.root}")
    own, planted = shared.root / f".llmctl-{USERS[BOB]}", shared.home(attacker) / "ran"
    address = (shared.root / "waits/code/supervisor").resolve().parent.name
    shared.run(attacker, "chmod", "0755", str(shared.home(attacker)))
    shared.attack(attacker, plant_supervisor(own, address, planted))
    run = shared.ended(BOB, "waits")
    if not shared.is_private:
        assert run["state"] == "failed" and f"is of {attacker}" in run["detail"], run
        assert planted.read_text() == "" and shared.ran_as(BOB, "waits") == ""
        refused = shared.llmctl(BOB, "resume", "waits")
        assert refused.returncode == 5 and f"belongs to {attacker}, not to you" in refused.stderr, refused.stderr
        shared.attack(attacker, put_back(own))
        if shared.kind == "2775":
            refused = shared.llmctl(BOB, "resume", "waits")
            assert refused.returncode != 0 and f"{shared.root} has no sticky bit" in refused.stderr, refused
            shared.attack(ALICE, f"chmod +t {shared.root}")
        resumed = shared.llmctl(BOB, "resume", "waits")
        assert resumed.returncode == 0, resumed.stderr
        run = shared.ended(BOB, "waits")
    assert run["state"] == "completed", run
    assert shared.ran_as(BOB, "waits") == f"{BOB}\n"


def test_a_run_in_the_place_of_bobs_is_not_resumed_and_carol_runs_hers(shared: Shared) -> None:
    users = (BOB,) if shared.is_private else (ALICE, BOB, CAROL)
    for user in users:
        shared.submit(user, f"of-{user}")
    for user in users:
        assert shared.ended(user, f"of-{user}")["state"] == "completed"
        assert shared.ran_as(user, f"of-{user}") == f"{user}\n"
    hers, his = shared.root / f"of-{ALICE}", shared.root / f"of-{BOB}"
    if not shared.is_private:
        # A run is private until its owner opens it.
        assert shared.run(ALICE, "bash", "-c", f"chmod 0755 {hers}; chmod 0644 {hers}/run.json").returncode == 0
        listed = shared.llmctl(CAROL, "status", "--cluster", "bed", "--all")
        assert f"of-{ALICE}" in listed.stdout and f"of-{BOB}" not in listed.stdout, listed
    shared.attack(ALICE, swap_run(hers, his))
    if not shared.is_private:
        for arguments in (("resume",), ("cancel",), ("interactive", "--run")):
            done = shared.llmctl(BOB, *arguments, his.name, *(("--", "true") if "--run" in arguments else ()))
            assert done.returncode == 5 and f"{his} belongs to {ALICE}, not to you" in done.stderr, done.stderr
        assert f"a run of {ALICE}" in shared.status(BOB, his.name)["detail"]
    assert shared.ran_as(BOB, his.name) == f"{BOB}\n"


def test_bob_can_cancel_his_waiting_job_although_alice_has_taken_its_folder(shared: Shared) -> None:
    hers, his = shared.root / f"held-of-{ALICE}", shared.root / f"held-of-{BOB}"
    if not shared.is_private:
        shared.submit(ALICE, hers.name, cluster="held")
    shared.submit(BOB, his.name, cluster="held")
    (job,) = shared.jobs(his.name)
    shared.attack(ALICE, swap_run(hers, his))
    done = shared.llmctl(BOB, "cancel", his.name)
    assert done.returncode == 0, done
    assert shared.jobs(his.name) == []
    if not shared.is_private:
        assert f"{his.name}: ended its job {job}; " in done.stdout, done
        assert f"{his} belongs to {ALICE}, not to you" in done.stdout, done
        assert len(shared.jobs(hers.name)) == 1
        assert 'cancel_requested": null' in (his / "run.json").read_text(), "alice's file stays as she made it"
        assert shared.llmctl(ALICE, "cancel", hers.name).returncode == 0
