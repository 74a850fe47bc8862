"""llmctl on the test's ssh hosts, from a machine that reaches only the gate."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.llmctl.documents import checked
from tests.schedulers import kernel_cache
from tests.schedulers.paced_training import write_training
from tests.schedulers.running import wait_for_end
from tests.testbeds.ssh_hosts import SshHosts
from tests.waiting import HANG_S

LLMCTL = str(Path(sys.executable).with_name("llmctl"))
GRACE_S = 10


@dataclass(frozen=True)
class Site:
    """One user of the hosts.

    Attributes:
        hosts: the test's hosts, by their names h1, h2 ... through the gate.
        home: of the user on this machine; holds the config file ``c.yaml``.
    """

    hosts: SshHosts
    home: Path

    def prepare(self) -> None:
        """Write the config file and the profiles ``lab`` and ``apart``; the hosts of ``apart`` share no folder."""
        folder = self.home / ".config" / "llmctl" / "clusters"
        folder.mkdir(parents=True)
        lab = {
            "scheduler": "ssh",
            "hosts": [*self.hosts.names],
            "runs_root": str(self.hosts.shared / "runs"),
            "resource_types": {"cpu": {"gpus": 0}},
            "defaults": {"resource_type": "cpu"},
            # Open MPI refuses to run as root without these.
            "environment": {
                "python": sys.executable,
                "setup": [
                    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                    kernel_cache.of_these_tests(),
                ],
            },
            "stop_grace_s": GRACE_S,
        }
        (folder / "lab.yaml").write_text(yaml.safe_dump(lab))
        apart = {**lab, "shared": False, "runs_root": str(self.hosts.local / "runs")}
        (folder / "apart.yaml").write_text(yaml.safe_dump(apart))
        write_training(self.home)

    def environ(self) -> dict[str, str]:
        """Environment of the user."""
        own = {"HOME": str(self.home), "OMP_NUM_THREADS": "1", "LLMCTL_CACHE_DIR": os.environ["LLMCTL_CACHE_DIR"]}
        return {**self.hosts.environ(), **own}

    def start(self, *args: str) -> "subprocess.Popen[str]":
        """Start llmctl; stdout and stderr go to one pipe."""
        return subprocess.Popen(
            [LLMCTL, *args], env=self.environ(), cwd=self.home, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def call(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run llmctl; any exit status is accepted."""
        return subprocess.run(
            [LLMCTL, *args], env=self.environ(), cwd=self.home, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip

    def llmctl(self, *args: str) -> str:
        """Run llmctl, which must succeed; return its output."""
        done = self.call(*args)
        assert done.returncode == 0, f"llmctl {' '.join(args)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return checked(args, done.stdout)

    def submit(self, run_id: str, *args: str, cluster: str = "lab") -> str:
        """Submit training of c.yaml, or the command after ``--``; return the output."""
        config = [] if "--" in args else ["c.yaml"]
        return self.llmctl("submit", *config, "--cluster", cluster, "--run-id", run_id, *args)

    def status(self, run_id: str) -> dict[str, Any]:
        """Status of one run."""
        (run,) = json.loads(self.llmctl("status", run_id, "--json"))["runs"]
        return dict(run)

    def ended(self, run_id: str) -> dict[str, Any]:
        """Wait until a run has ended."""
        return wait_for_end(self.path(run_id), lambda: self.status(run_id), lambda: self.logs(run_id))

    def path(self, run_id: str) -> Path:
        """The run directory on the shared file system."""
        return self.hosts.shared / "runs" / run_id

    def logs(self, run_id: str) -> str:
        """Logs of job.sh and the agents."""
        paths = [*self.path(run_id).glob("job*.log"), *self.path(run_id).glob("attempts/*/node-*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(paths))

    def losses(self, run_id: str) -> dict[int, float]:
        """Loss by iteration, the last row of each."""
        path = self.path(run_id) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}

    def iteration(self, run_id: str) -> int:
        """The last iteration in the metrics; 0 before the first."""
        return max(self.losses(run_id), default=0)

    def on_terminal(self, keys: str, *args: str) -> tuple[int, str]:
        """Run llmctl on a new terminal, typing ``keys`` at the first prompt; returns (exit status, output)."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.home)
            os.execvpe(LLMCTL, [LLMCTL, *args], {**self.environ(), "TERM": "dumb"})
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
            if not typed and seen.rstrip(b" ").endswith((b"#", b"$")):
                os.write(terminal, keys.encode())
                typed = True
        else:
            os.kill(pid, 9)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
        return status, seen.decode(errors="replace")
