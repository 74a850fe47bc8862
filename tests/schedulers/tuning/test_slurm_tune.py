"""``llmctl tune`` on a real Slurm: layouts over two nodes inside one job."""

import json

import pytest
import yaml

from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TUNE = ("tune", "c.yaml", "--cluster", "bed", "--nodes", "2", "--layouts", "2", "--steps", "2")
MODEL = ("--set", "model.vocab_size=512", "--set", "training.device=cpu")


def test_one_job_tries_the_layouts_and_the_fastest_becomes_a_config(site: Site) -> None:
    found = json.loads(site.llmctl(*TUNE, *MODEL, "--json", "--output", "best.yaml"))
    rows = found["rows"]
    assert (found["nodes"], found["devices"]) == (2, 2)
    assert 2 <= len(rows) <= 3 and {row["outcome"] for row in rows} == {"ok"}, site.scheduler_report()
    last = max(row["rounds"] for row in rows)
    assert rows[0]["rounds"] == last
    assert rows[0]["iteration_time_s"] == min(row["iteration_time_s"] for row in rows if row["rounds"] == last)
    folder = site.path(found["run_id"])
    trials = sorted(each.name for each in (folder / "tune").iterdir())
    assert len(trials) == len((folder / "tune.jsonl").read_text().splitlines()) == sum(row["rounds"] for row in rows)
    # One job, whose ranks were on both nodes.
    assert len(list((site.home / "runs").glob("tune-c-*"))) == 1
    assert len(site.status(found["run_id"])["hosts"]) == 2
    logs = {each.name for each in (folder / "tune/trial-000").glob("node-*.log")}
    assert logs == {"node-00000.log", "node-00001.log"}
    # The same command again submits nothing.
    assert json.loads(site.llmctl(*TUNE, *MODEL, "--json")) == found
    best = yaml.safe_load((site.home / "best.yaml").read_text())
    assert best["job"]["nodes"] == 2 and best["training"]["train_iters"] < 1_000_000
    for key, value in rows[0]["settings"].items():
        section, _, name = key.partition(".")
        assert best.get(section, {}).get(name) == value
