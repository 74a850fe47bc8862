"""llmctl on a user's laptop, which has only an ssh host name of the cluster."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.schedulers import kernel_cache
from tests.schedulers.paced_training import write_training
from tests.schedulers.slurm_site import GRACE_S, LLMCTL, Site
from tests.testbeds.login_node import LoginNode
from tests.waiting import HANG_S

CLUSTER = "bed"
_SLOW_CLOCK = """\
import sys, time
true_time, offset = time.time, float(sys.argv.pop(1))
time.time = lambda: true_time() + offset
from llmctl.cli.main import run
run()
"""


@dataclass(frozen=True)
class Laptop(Site):
    """One user of the cluster, on a laptop. ``home`` is the laptop's.

    Attributes:
        login: the login node.
        runs: folder of the runs, on the cluster.
    """

    login: LoginNode
    runs: Path

    def prepare(self) -> None:
        """Write the profile of an invented site, and the config file; ``clusters setup`` does the rest."""
        folder = self.home / ".config" / "llmctl" / "clusters"
        folder.mkdir(parents=True)
        profile = {
            "scheduler": "slurm",
            "resource_types": {"cpu": {"gpus": 0, "cores": 8}},
            "defaults": {"resource_type": "cpu", "queue": "debug"},
            "stop_grace_s": GRACE_S,
            "environment": {"setup": [kernel_cache.of_these_tests()]},
        }
        (folder / f"{CLUSTER}.yaml").write_text(yaml.safe_dump(profile))
        write_training(self.home)

    def set_up(self) -> str:
        """``clusters setup``, as a user calls it with flags."""
        flags = ("--login", "hpc", "--runs-root", str(self.runs), "--python", sys.executable)
        return self.llmctl("clusters", "setup", CLUSTER, *flags)

    def argv(self, *args: str) -> list[str]:
        """Command that starts llmctl: on this machine."""
        return [LLMCTL, *args]

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of the laptop."""
        return {**self.login.environ(), "HOME": str(self.home), "OMP_NUM_THREADS": "1", **(more or {})}

    def path(self, run_id: str) -> Path:
        """Run directory, which this machine sees too."""
        return self.runs / run_id

    def with_clock_off(self, seconds: float, *args: str) -> str:
        """Run llmctl on a laptop with a wrong clock; return its output."""
        argv = [sys.executable, "-c", _SLOW_CLOCK, str(seconds), *args]
        done = subprocess.run(
            argv, env=self.environ(), cwd=self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
