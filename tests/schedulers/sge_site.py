"""llmctl on the test's Grid Engine: the bundled profile ``abci`` and a small overlay."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.schedulers import kernel_cache
from tests.schedulers.paced_training import write_training
from tests.schedulers.slurm_site import Site
from tests.testbeds.sge_cluster import SgeCluster


@dataclass(frozen=True)
class SgeSite(Site):
    """One user of the cluster.

    Attributes:
        cluster: the test's cluster.
        home: of the user; holds the config file ``c.yaml`` and the runs.
    """

    cluster: SgeCluster  # type: ignore[assignment]

    def prepare(self) -> None:
        """Write the overlay of ``abci`` and the config file."""
        self.write_overlay(self.home, group=self.cluster.groups[0])
        write_training(self.home)

    def write_overlay(self, home: Path, **more: str) -> None:
        """Overlay of a user: folder of the runs, Python, and group to bill."""
        folder = home / ".config" / "llmctl" / "clusters"
        folder.mkdir(parents=True)
        environment = {"kind": "venv", "path": sys.prefix, "setup": [kernel_cache.of_these_tests()]}
        own = {"runs_root": str(home / "runs"), "environment": environment, **more}
        (folder / "abci.yaml").write_text(yaml.safe_dump(own))

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of a user on the login node, and the names of the variables to pass on."""
        kept = ("HOME", "LLMCTL_CACHE_DIR", "OMP_NUM_THREADS", "PS1", "TERM", *(more or ()))
        return {**super().environ(more), "TESTBED_KEEP": " ".join(kept)}

    def queue(self, job_id: str) -> list[str]:
        """Lines of qstat for a job."""
        return [line for line in self.cluster.run("qstat", "-u", "*").splitlines() if line.split()[:1] == [job_id]]

    def scheduler_report(self) -> str:
        """Queues, jobs, and the ends of the daemons' logs."""
        files = sorted(self.cluster.state.glob("execd/*/messages"))
        files += [self.cluster.state / "spool" / "qmaster" / "messages"]
        written = (f"{file}:\n{file.read_text(errors='replace')[-2000:]}" for file in files if file.exists())
        return "\n".join((self.cluster.run("qstat", "-f", "-u", "*"), *written))
