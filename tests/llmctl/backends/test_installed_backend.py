"""Schedulers that an installed package adds, without a change of llmctl."""

import importlib.metadata

import pytest

from llmctl.backends import load_backend, load_queue_backend
from llmctl.cli.main import main
from llmctl.errors import ProfileError
from llmctl.site.profile import SCHEDULERS, ClusterProfile

PACKAGE = """
from pathlib import Path
from llmctl.backends.base import ProfileHints
from llmctl.backends.slurm.backend import SlurmBackend

class FluxBackend(SlurmBackend):
    def profile_hints(self):
        return ProfileHints("See `flux resource list`.", "{gpus: 6}", "torchrun", "The bank (flux batch -B).")
    def priority_problem(self, priority):
        return f"{priority} is too much for Flux" if priority > 10 else ""

BACKEND = FluxBackend(name="flux", template=str(Path(__file__).with_name("flux.sh.j2")))
"""
TEMPLATE = """#!/bin/bash
{% for line in directives %}
# flux: {{ line | raw }}
{% endfor %}
{% set job_id = '"$FLUX_JOB_ID"' %}
{% set supervisor = "" %}
{% include "_supervisor.sh.j2" %}
"""


@pytest.fixture
def flux(own_folders, monkeypatch):
    """An installed package with the entry points flux and broken; returns the user's folder."""
    info = own_folders / "packages/llmctl_flux-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llmctl-flux\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[llmctl.backends]\nflux = llmctl_flux:BACKEND\nbroken = no_such_module:BACKEND\n"
    )
    (info.parent / "llmctl_flux").mkdir()
    (info.parent / "llmctl_flux/__init__.py").write_text(PACKAGE)
    (info.parent / "llmctl_flux/flux.sh.j2").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(info.parent)
    return own_folders / "config/llmctl/clusters"


def test_a_profile_can_use_an_installed_backend(flux, tmp_path, capsys):
    assert main(["clusters", "new", "lab", "--scheduler", "flux", "--runs-root", str(tmp_path / "runs")]) == 0
    text = (flux / "lab.yaml").read_text()
    assert "scheduler: flux\n" in text and "See `flux resource list`." in text and "# The bank (flux batch -B)." in text
    assert main(["clusters", "validate", "lab"]) == 0
    capsys.readouterr()
    assert main(["submit", "--cluster", "lab", "--priority", "11", "--show-script", "--", "true"]) == 2
    assert "--priority: 11 is too much for Flux" in capsys.readouterr().err
    assert main(["submit", "--cluster", "lab", "--priority", "3", "--show-script", "--", "true"]) == 0
    script = capsys.readouterr().out
    assert "# flux: --nice=-3" in script and '--job-id "$FLUX_JOB_ID"' in script
    assert load_queue_backend("flux").name == "flux"
    (flux.parent / "templates").mkdir()
    (flux.parent / "templates/flux.sh.j2").write_text("echo mine\n")
    assert main(["submit", "--cluster", "lab", "--show-script", "--", "true"]) == 0
    assert "echo mine" in capsys.readouterr().out


@pytest.mark.usefixtures("flux")
def test_a_backend_that_cannot_be_imported_is_named():
    assert ClusterProfile(name="lab", scheduler="broken").scheduler == "broken"
    with pytest.raises(ProfileError, match="scheduler: broken: its backend no_such_module:BACKEND cannot be imported"):
        load_backend("broken")


def test_an_unknown_scheduler_is_refused_with_the_valid_names(flux, capsys):
    flux.mkdir(parents=True)
    (flux / "lab.yaml").write_text("scheduler: fulx\n")
    assert main(["clusters", "validate", "lab"]) == 3
    assert f"the schedulers are {', '.join(SCHEDULERS)}, broken, flux" in capsys.readouterr().err
    with pytest.raises(ProfileError, match="scheduler: fulx: no installed package"):
        load_backend("fulx")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_bundled_schedulers_never_read_package_metadata(scheduler, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: pytest.fail("package metadata was read"))
    assert load_backend(ClusterProfile(name="lab", scheduler=scheduler).scheduler).name == scheduler


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_backend_starts_jobs_in_exactly_one_way(scheduler):
    capabilities = load_backend(scheduler).capabilities
    ways = (capabilities.has_queue, capabilities.starts_on_hosts, capabilities.starts_in_place)
    assert sum(ways) == 1
    assert (load_queue_backend(scheduler) is not None) is capabilities.has_queue
