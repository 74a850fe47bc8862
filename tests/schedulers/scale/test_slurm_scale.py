"""``llmctl scale`` on a real Slurm: two sizes as jobs, and a table of what their metrics say."""

import json
import signal
import subprocess
from statistics import median

import pytest

from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster
from tests.waiting import HANG_S, wait_for

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
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["iteration_time_s"])
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


def test_ctrl_c_leaves_the_jobs_in_the_queue(site: Site) -> None:
    words = ("scale", "c.yaml", "--cluster", "bed-held", "--nodes", "1,2", "--name", "held", *MODEL)
    # A test run in the background of a shell has Ctrl-C ignored, and its processes inherit that.
    argv = ["env", "--default-signal=INT", *site.argv(*words)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=site.environ(), cwd=site.home, text=True, **output) as waiting:  # type: ignore[call-overload]
        assert waiting.stderr is not None
        said: list[str] = []

        def waits() -> bool:
            said.append(waiting.stderr.readline())
            assert said[-1], f"has ended: {''.join(said)}"
            return said[-1] == "held-2n: pending\n"

        wait_for(waits, lambda: "".join(said), step_s=0.0)
        waiting.send_signal(signal.SIGINT)
        table, words_at_end = waiting.communicate(timeout=HANG_S)
    assert (waiting.returncode, table) == (130, "")
    assert "the runs go on" in words_at_end and "llmctl scale held --follow" in words_at_end
    jobs = [site.status(f"held-{nodes}n")["job_ids"][-1] for nodes in (1, 2)]
    assert [len(site.queue(job)) for job in jobs] == [1, 1]
    shown = site.call("scale", "held")
    assert shown.returncode == 0 and "2 runs have not ended; to wait: llmctl scale held --follow" in shown.stderr
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["STATE", "pending", "pending"]
    for nodes in (1, 2):
        site.llmctl("cancel", f"held-{nodes}n")
    ended = site.call("scale", "held", "--follow")
    assert ended.returncode == 6 and "--again runs failed sizes again" in ended.stderr
