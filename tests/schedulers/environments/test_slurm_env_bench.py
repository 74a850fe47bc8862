"""``llmctl env bench`` on a real Slurm: two nodes with two ranks each, and a job that an interrupted command left."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster
from tests.waiting import HANG_S, wait_for

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
BENCH = ("env", "bench", "--gpus-per-node", "2", "--time", "0:20:00", "--json")


def runs(site: Site, cluster: str) -> list[Path]:
    """Run directories of the measurements of a cluster."""
    return sorted((site.home / "runs").glob(f"bench-{cluster}-??????-*"))


def test_all_groups_of_two_nodes_are_measured(site: Site) -> None:
    shown = site.llmctl("env", "bench", "--cluster", "bed", "--dry-run")
    assert "2 nodes" in shown and not runs(site, "bed")
    document = json.loads(site.llmctl(*BENCH, "--cluster", "bed"))
    (run_dir,) = runs(site, "bed")
    assert (document["run_id"], document["nodes"], document["devices_per_node"]) == (run_dir.name, 2, 2)
    assert len(set(document["hosts"])) == 2 and set(document["hosts"]) <= {"n1", "n2", "n3", "n4"}
    groups = {(one["group"], one["ranks"]) for one in document["measurements"]}
    assert groups == {("device", 1), ("node", 2), ("one per node", 2), ("all", 4)}
    for one in document["measurements"]:
        assert one["rate"] == pytest.approx(one["work"] / one["seconds"]), one
    kept = site.home / ".local/state/llmctl/hardware/bed.json"
    assert json.loads(kept.read_text()) == document
    assert site.status(run_dir.name)["state"] == "completed"


@pytest.mark.proof
def test_an_interrupted_command_leaves_its_job_and_comes_back_to_it(site: Site) -> None:
    words = (*BENCH, "--cluster", "bed-held")
    first = site.start(*words)
    wait_for(lambda: [path for path in runs(site, "bed-held") if (path / "run.json").exists()], "the job")
    (run_dir,) = runs(site, "bed-held")
    wait_for(lambda: site.status(run_dir.name)["job_ids"], "its id")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=HANG_S)
    second = site.start(*words, stderr=subprocess.DEVNULL)
    site.cluster.run("scontrol", "release", site.status(run_dir.name)["job_ids"][-1])
    output, _ = second.communicate(timeout=HANG_S)
    assert second.returncode == 0 and json.loads(output)["run_id"] == run_dir.name, output
    assert runs(site, "bed-held") == [run_dir]


def test_a_cancelled_run_is_told_and_measured_anew(site: Site) -> None:
    words = ("env", "bench", "--cluster", "bed-held", "--nodes", "1")
    before, first = runs(site, "bed-held"), site.start(*words)

    def new() -> list[Path]:
        return [path for path in runs(site, "bed-held") if path not in before and (path / "run.json").exists()]

    wait_for(new, "the job")
    (run_dir,) = new()
    wait_for(lambda: site.status(run_dir.name)["job_ids"], "its id")
    site.llmctl("cancel", run_dir.name)
    output, _ = first.communicate(timeout=HANG_S)
    assert first.returncode != 0 and f"{run_dir.name} cancelled" in output, output
