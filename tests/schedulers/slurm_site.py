"""llmctl on the test's Slurm cluster: a home with profiles, and the runs."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.llmctl.documents import checked
from tests.schedulers import kernel_cache
from tests.schedulers.paced_training import write_training
from tests.schedulers.running import wait_for_end
from tests.testbeds.slurm_cluster import SlurmCluster
from tests.waiting import HANG_S, wait_for

LLMCTL = str(Path(sys.executable).with_name("llmctl"))
# More than a loaded machine needs to save. Who has saved leaves at once.
GRACE_S = 120


@dataclass(frozen=True)
class Site:
    """One user of the cluster.

    Attributes:
        cluster: the test's cluster.
        home: of the user; holds the config file ``c.yaml`` and the runs.
    """

    cluster: SlurmCluster
    home: Path

    def prepare(self) -> None:
        """Write the profiles ``bed``, ``bed-held`` and ``bed-pyxis`` and the config file."""
        folder = self.home / ".config" / "llmctl" / "clusters"
        folder.mkdir(parents=True)
        profile = {
            "scheduler": "slurm",
            "runs_root": str(self.home / "runs"),
            "resource_types": {"cpu": {"gpus": 0, "cores": 8}, "gpu": {"gpus": 2, "cores": 8}},
            "defaults": {"resource_type": "cpu", "queue": "debug"},
            "stop_grace_s": GRACE_S,
            # Open MPI refuses to run as root without these.
            "environment": {
                "setup": [
                    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                    kernel_cache.of_these_tests(),
                ]
            },
        }
        (folder / "bed.yaml").write_text(yaml.safe_dump(profile))
        # Its jobs wait in the queue.
        (folder / "bed-held.yaml").write_text(yaml.safe_dump({**profile, "options": ["--hold"]}))
        pyxis = {"runtime": "pyxis", "mount_home": False, "workdir": "/usr", "env": ["NCCL_DEBUG"]}
        (folder / "bed-pyxis.yaml").write_text(yaml.safe_dump({**profile, "container": pyxis}))
        write_training(self.home)

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of a user on the login node."""
        return {**os.environ, **self.cluster.environ(), "HOME": str(self.home), "OMP_NUM_THREADS": "1", **(more or {})}

    def argv(self, *args: str) -> list[str]:
        """Command that starts llmctl: on the login node."""
        return self.cluster.argv(LLMCTL, *args)

    def start(self, *args: str, **more: Any) -> "subprocess.Popen[str]":
        """Start llmctl."""
        argv = self.argv(*args)
        output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(argv, env=self.environ(), cwd=self.home, **{**output, **more})

    def call(self, *args: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run llmctl; any exit status is accepted."""
        return subprocess.run(
            self.argv(*args), env=self.environ(env), cwd=self.home, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip

    def llmctl(self, *args: str, env: Mapping[str, str] | None = None) -> str:
        """Run llmctl, which must succeed; return its output."""
        done = self.call(*args, env=env)
        assert done.returncode == 0, f"llmctl {' '.join(args)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return checked(args, done.stdout)

    def on_terminal(self, keys: str, *args: str) -> tuple[int, str]:
        """Run llmctl on a new terminal, typing ``keys`` after the first output; returns (exit status, output)."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.home)
            argv = self.argv(*args)
            os.execvpe(argv[0], argv, {**self.environ(), "PS1": "$ ", "TERM": "dumb"})
        seen, typed, end = b"", False, time.monotonic() + HANG_S
        while time.monotonic() < end:
            ready, _, _ = select.select([terminal], [], [], 0.5)
            try:
                piece = os.read(terminal, 65536) if ready else None
            except OSError:
                break  # the terminal has closed
            if piece == b"":
                break
            seen += piece or b""
            # The shell's prompt, on a separate line after the launcher's output.
            if not typed and seen.rstrip(b" ").endswith((b"#", b"$")):
                os.write(terminal, keys.encode())
                typed = True
        else:
            os.kill(pid, 9)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
        return status, seen.decode(errors="replace")

    def submit(self, run_id: str, *args: str, cluster: str = "bed", env: Mapping[str, str] | None = None) -> str:
        """Submit training of c.yaml, or the command after ``--``; return the job's id."""
        config = [] if "--" in args else ["c.yaml"]
        self.llmctl("submit", *config, "--cluster", cluster, "--run-id", run_id, *args, env=env)
        return str(self.status(run_id)["job_ids"][-1])

    def status(self, run_id: str) -> dict[str, Any]:
        """Status of one run."""
        (run,) = json.loads(self.llmctl("status", run_id, "--json"))["runs"]
        return dict(run)

    def wait_until(self, run_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until a condition holds for the status of a run."""
        run: dict[str, Any] = {}

        def holds() -> bool:
            run.update(self.status(run_id))
            return condition(run)

        def report() -> str:
            return f"{run}\n{self.job_log(run_id)}\n{self.scheduler_report()}"

        # Each llmctl costs half a second of the processors that the job needs: a long wait asks seldom.
        wait_for(holds, report, step_s=1.0, longest_step_s=10.0)
        return run

    def scheduler_report(self) -> str:
        """The scheduler's reports, for the message of a failed test."""
        return self.cluster.run("squeue", "-a") + self.cluster.run("sinfo", "-N", "-l")

    def ended(self, run_id: str) -> dict[str, Any]:
        """Wait until a run has ended."""
        return wait_for_end(
            self.path(run_id),
            lambda: self.status(run_id),
            lambda: f"{self.job_log(run_id)}\n{self.scheduler_report()}",
        )

    def path(self, run_id: str) -> Path:
        """The run directory."""
        return self.home / "runs" / run_id

    def job_log(self, run_id: str) -> str:
        """Log of job.sh and the launcher."""
        path = self.path(run_id) / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def losses(self, run_id: str) -> dict[int, float]:
        """Loss by iteration, the last row of each."""
        rows = [json.loads(line) for line in (self.path(run_id) / "metrics.jsonl").read_text().splitlines()]
        return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}

    def iteration(self, run_id: str) -> int:
        """The last iteration in the metrics; 0 before the first."""
        path = self.path(run_id) / "metrics.jsonl"
        return max(self.losses(run_id), default=0) if path.exists() else 0

    def queue(self, job_id: str) -> Sequence[str]:
        """Lines of squeue for a job."""
        return self.cluster.run("squeue", "-h", "-o", "%i %T", "-j", job_id).splitlines()


@pytest.fixture(scope="module")
def site(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A home with profiles on the Slurm of a file of tests; its jobs end with the file."""
    site = Site(slurm_cluster, tmp_path_factory.mktemp("slurm"))
    site.prepare()
    yield site
    slurm_cluster.run("scancel", "--user=root")
