"""Schedulers that an installed package adds, without a change of llmctl."""

import importlib.metadata

import pytest

from llmctl.backends import load_backend, load_queue_backend
from llmctl.cli.main import main
from llmctl.errors import ProfileError
from llmctl.site.profile import SCHEDULERS, ClusterProfile

PACKAGE = """
from llmctl.backends.base import ProfileHints
from llmctl.backends.slurm.backend import SlurmBackend

class LsfBackend(SlurmBackend):
    def profile_hints(self):
        return ProfileHints("See `bhosts`.", "{gpus: 6}", "torchrun", "The project (bsub -P).")
    def priority_problem(self, priority):
        return f"{priority} is too much for LSF" if priority > 10 else ""

BACKEND = LsfBackend(name="lsf")
"""


@pytest.fixture
def lsf(tmp_path, monkeypatch):
    """Install a package with two entry points: lsf, and one with a missing module; returns the user's folder."""
    for name, value in {"XDG_CONFIG_HOME": "config", "XDG_STATE_HOME": "state", "HOME": "home"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    for name in ("LLMCTL_RUNS_ROOT", "LLMCTL_GROUP", "LLMCTL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    info = tmp_path / "packages/llmctl_lsf-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llmctl-lsf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[llmctl.backends]\nlsf = llmctl_lsf:BACKEND\nbroken = no_such_module:BACKEND\n"
    )
    (info.parent / "llmctl_lsf.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(info.parent)
    return tmp_path / "config/llmctl/clusters"


def test_a_profile_may_name_it_and_jobs_go_through_it(lsf, tmp_path, capsys):
    assert main(["clusters", "new", "lab", "--scheduler", "lsf", "--runs-root", str(tmp_path / "runs")]) == 0
    text = (lsf / "lab.yaml").read_text()
    assert "scheduler: lsf\n" in text and "See `bhosts`." in text and "# The project (bsub -P)." in text
    assert main(["clusters", "validate", "lab"]) == 0
    capsys.readouterr()
    assert main(["submit", "--cluster", "lab", "--priority", "11", "--dry-run", "--", "true"]) == 2
    assert "--priority: 11 is too much for LSF" in capsys.readouterr().err
    assert main(["submit", "--cluster", "lab", "--priority", "3", "--dry-run", "--", "true"]) == 0
    assert "#SBATCH --nice=-3" in capsys.readouterr().out
    assert load_queue_backend("lsf").name == "lsf"


@pytest.mark.usefixtures("lsf")
def test_one_that_cannot_be_imported_is_named():
    assert ClusterProfile(name="lab", scheduler="broken").scheduler == "broken"
    with pytest.raises(ProfileError, match="scheduler: broken: its backend no_such_module:BACKEND cannot be imported"):
        load_backend("broken")


def test_an_unknown_scheduler_is_refused_with_those_there_are(lsf, capsys):
    lsf.mkdir(parents=True)
    (lsf / "lab.yaml").write_text("scheduler: lfs\n")
    assert main(["clusters", "validate", "lab"]) == 3
    assert "the schedulers are slurm, sge, pbs, ssh, local, broken, lsf" in capsys.readouterr().err
    with pytest.raises(ProfileError, match="scheduler: lfs: no installed package"):
        load_backend("lfs")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_our_own_schedulers_never_cost_a_look_at_installed_packages(scheduler, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: pytest.fail("package metadata was read"))
    assert load_backend(ClusterProfile(name="lab", scheduler=scheduler).scheduler).name == scheduler


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_jobs_start_in_exactly_one_way(scheduler):
    capabilities = load_backend(scheduler).capabilities
    ways = (capabilities.has_queue, capabilities.starts_on_hosts, capabilities.starts_in_place)
    assert sum(ways) == 1
    assert (load_queue_backend(scheduler) is not None) is capabilities.has_queue
