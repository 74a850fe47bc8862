"""``llmctl scale`` on a real Slurm: two sizes as jobs, and a table of what their metrics say."""

import json
from statistics import median

import pytest

from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
SCALE = ("scale", "c.yaml", "--cluster", "bed", "--nodes", "1,2", "--time", "10m", "--launcher", "srun")
MODEL = ("--set", "model.vocab_size=512", "--set", "training.device=cpu")


def test_two_sizes_are_measured_once(site: Site) -> None:
    planned = json.loads(site.llmctl(*SCALE, *MODEL, "--dry-run", "--json"))
    assert [row["run_id"] for row in planned["rows"]] == [None, None]
    found = json.loads(site.llmctl(*SCALE, *MODEL, "--json"))
    assert [(row["nodes"], row["devices"], row["state"]) for row in found["rows"]] == [
        *((1, 1, "completed"), (2, 2, "completed")),
    ], site.scheduler_report()
    for row, before in zip(found["rows"], planned["rows"], strict=True):
        lines = (site.path(row["run_id"]) / "metrics.jsonl").read_text().splitlines()
        rows = [each for each in map(json.loads, lines) if "lm_loss" in each]
        assert [each["iteration"] for each in rows] == list(range(1, 21))
        assert row["iteration_time_s"] == median(each["iteration_time_s"] for each in rows[3:])
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["iteration_time_s"])
        assert row["predicted_iteration_time_s"] == before["predicted_iteration_time_s"]
        assert row["prediction_error"] == pytest.approx(row["predicted_iteration_time_s"] / row["iteration_time_s"] - 1)
        run = site.status(row["run_id"])
        assert (run["name"], len(run["hosts"])) == (f"c-{row['nodes']}n", row["nodes"])
    # The same command again, and the name alone, submit nothing.
    runs = sorted(path.name for path in (site.home / "runs").iterdir())
    assert json.loads(site.llmctl(*SCALE, *MODEL, "--json")) == found
    assert json.loads(site.llmctl("scale", "c", "--json")) == found
    assert sorted(path.name for path in (site.home / "runs").iterdir()) == runs
    table = site.llmctl("scale", "c").splitlines()
    assert [line.split()[0] for line in table] == ["RUN", "c-1n", "c-2n"]
