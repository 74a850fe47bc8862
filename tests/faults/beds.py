"""The places of the runs: this machine, and the test beds of the schedulers."""

import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.faults import user_faults
from tests.schedulers import kernel_cache
from tests.schedulers.sge_site import SgeSite
from tests.schedulers.slurm_site import LLMCTL, Site
from tests.schedulers.ssh_site import Site as SshSite
from tests.schedulers.test_pbs_standin import own_address
from tests.testbeds import sge_cluster, slurm_cluster, ssh_hosts
from tests.waiting import wait_for

LAST, SAVE_INTERVAL = 60, 10
CONFIG = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "vocab_size": 64},
    "training": {
        "train_iters": LAST,
        "seq_length": 16,
        "global_batch_size": 4,
        "kernel_backend": "reference",
        "device": "cpu",
        "eval_iters": 0,
    },
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
    "checkpoint": {"save_interval": SAVE_INTERVAL},
    "logging": {"log_interval": 1},
    "hooks": {
        "lr_function": "user_faults:rate",
        "loss_function": "user_faults:loss",
        "after_step": ["user_faults:after"],
    },
    "job": {"nodes": 2, "code": ["user_faults.py"]},
}
"""Float32 on two nodes with one rank each; the smallest model."""


@dataclass
class Bed:
    """A place of runs.

    Attributes:
        name: of the bed.
        site: one user of the place (tests/schedulers).
        flags: words of every submit, with the cluster.
        save_interval: iterations between two saves.
    """

    name: str
    site: Any
    flags: tuple[str, ...]
    save_interval: int = SAVE_INTERVAL
    _losses: dict[int, float] = field(default_factory=dict)

    def submit(self, run_id, *words, env=None):
        """Submit the training of the test, with further variables in the environment of llmctl."""
        more = {"env": env} if env else {}
        self.site.llmctl("submit", "f.yaml", "--run-id", run_id, *self.flags, *words, **more)

    def wait_until_idle(self):
        """Wait until Slurm has all nodes: the fault of the case before may keep one of them for a while."""
        if self.name == "slurm":
            nodes = ("sinfo", "-h", "-N", "-p", "debug", "-o", "%T")
            wait_for(lambda: set(self.site.cluster.run(*nodes).split()) == {"idle"}, self.site.scheduler_report)

    def on_host(self, name, *command):
        """Run a command as root on a host of the bed."""
        if self.name == "ssh":
            return self.site.hosts.on_host(name, *command)
        cluster = self.site.cluster
        return cluster.on_node(name, *command) if self.name == "slurm" else cluster.run(*command, host=name)

    def losses(self):
        """Loss by iteration of a run without a fault, which is made once."""
        if not self._losses:
            self.submit("whole")
            run = self.site.ended("whole")
            assert run["state"] == "completed", run
            self._losses.update(self.site.losses("whole"))
        return self._losses


class PreemptingCluster(slurm_cluster.SlurmCluster):
    """A Slurm whose partition ``urgent`` takes the nodes of other jobs, which are requeued (preempt.html of Slurm)."""

    def _write_files(self):
        super()._write_files()
        path = self.state / "slurm.conf"
        urgent = f"PartitionName=urgent Nodes={','.join(self.nodes)} PriorityTier=10 MaxTime=10 State=UP"
        path.write_text(f"{path.read_text()}\nPreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n{urgent}\n")


class LocalSite(Site):
    """One user of this machine."""

    def prepare(self):
        """Make the home."""
        self.home.mkdir(exist_ok=True)

    def environ(self, more=None):
        """Environment of the user."""
        own = {"HOME": str(self.home), "OMP_NUM_THREADS": "1", "LLMCTL_RUNS_ROOT": str(self.home / "runs")}
        return {**os.environ, **own, "CUDA_VISIBLE_DEVICES": "", **(more or {})}

    def argv(self, *args):
        """Command that starts llmctl."""
        return [LLMCTL, *args]

    def scheduler_report(self):
        """Nothing: no scheduler."""
        return ""


class PbsSite(LocalSite):
    """One user of the stand-in for PBS, with the bundled profile ``abci3``."""

    def prepare(self):
        """Write the overlay and the state of the stand-in."""
        (self.home / "pbs/faults").mkdir(parents=True)
        (self.home / "pbs/queues").write_text("rt_HF rt_HG\n")
        (self.home / "pbs/nodes").write_text(f"hnode001\n{own_address()}\n")
        folder = self.home / ".config/llmctl/clusters"
        folder.mkdir(parents=True)
        environment = {"setup": [kernel_cache.of_these_tests()]}
        overlay = {"runs_root": str(self.home / "runs"), "group": "gaa50000", "stop_grace_s": 5}
        (folder / "abci3.yaml").write_text(yaml.safe_dump({**overlay, "environment": environment}))

    def environ(self, more=None):
        """Environment of the user, with the stand-in's commands."""
        own = super().environ(more)
        del own["LLMCTL_RUNS_ROOT"]
        path = f"{Path(__file__).parents[1] / 'standins/pbs/bin'}:{own['PATH']}"
        return {**own, "PATH": path, "PBS_STANDIN_STATE": str(self.home / "pbs")}


@contextmanager
def local():
    """Two agents on this machine."""
    with _home() as home:
        yield prepared("local", LocalSite(None, home), ("--cluster", "local"))


@contextmanager
def slurm():
    """Two nodes of a real Slurm."""
    with _home() as state, _home() as home:
        cluster = PreemptingCluster(state)
        cluster.start()
        try:
            yield prepared("slurm", Site(cluster, home), ("--cluster", "bed", "--launcher", "torchrun"))
        finally:
            cluster.stop()


@contextmanager
def sge():
    """Two hosts of a real Grid Engine."""
    with _home() as state, _home() as home:
        cluster = sge_cluster.SgeCluster(state / "testbed")
        cluster.start()
        try:
            flags = ("--cluster", "abci", "--gpus-per-node", "1", "--launcher", "torchrun")
            yield prepared("sge", SgeSite(cluster, home), flags)
        finally:
            cluster.stop()


@contextmanager
def ssh():
    """Two real sshd hosts behind a gate."""
    with _home() as state, _home() as home:
        hosts = ssh_hosts.SshHosts(state)
        hosts.start()
        try:
            yield prepared("ssh", SshSite(hosts, home), ("--cluster", "lab"))
        finally:
            hosts.stop()


@contextmanager
def pbs():
    """Two names of this machine, and a stand-in for PBS."""
    with _home() as home:
        yield prepared("pbs", PbsSite(None, home), ("--cluster", "abci3", "--gpus-per-node", "1"))


OPENED = {"local": local, "slurm": slurm, "sge": sge, "ssh": ssh, "pbs": pbs}
_BEDS = {"slurm": slurm_cluster, "sge": sge_cluster, "ssh": ssh_hosts}


def lack_of(name):
    """Reason why a bed cannot be had on this machine; empty if it can."""
    if name == "pbs":
        return "" if own_address() else "needs an address other than the loopback's"
    if name not in _BEDS:
        return ""
    if os.geteuid() != 0:
        return "needs root"
    missing = _BEDS[name].missing_programs()
    return f"needs {', '.join(missing)}" if missing else ""


def prepared(name, site, flags):
    """Write the config and the hooks to the home of a site."""
    site.prepare()
    (site.home / "f.yaml").write_text(yaml.safe_dump(CONFIG))
    (site.home / "user_faults.py").write_text(Path(user_faults.__file__).read_text())
    return Bed(name, site, flags)


@contextmanager
def _home():
    # Paths of sockets have at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def clean_environment():
    """Unset the variables of the user that would reach the runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = os.environ.get("LLMCTL_CACHE_DIR") or str(cache / "llmctl")
    for name in list(os.environ):
        if name.startswith(("LLMCTL_", "XDG_", "SLURM_", "OMPI_", "PMI_")):
            del os.environ[name]
    os.environ["LLMCTL_CACHE_DIR"] = kept
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
