"""Offline runs of Weights & Biases, read by its own tool, and compared with metrics.jsonl."""

import json
import subprocess
import sys

import pytest

from tests.test_architecture import ROOT
from tests.trainer.trackers.tracked_run import computed, expected, log, prepare, rows, train, train_until_killed
from tests.waiting import HANG_S

pytest.importorskip("wandb")

PROJECT = {"wandb_project": "p", "wandb_mode": "offline", "wandb_group": "g", "wandb_tags": ["t"]}


@pytest.fixture
def variables(tmp_path):
    """The package's own folders, and its key, which must not appear anywhere."""
    folders = {f"WANDB_{name}_DIR": str(tmp_path / "own") for name in ("CACHE", "CONFIG", "DATA")}
    return {**folders, "WANDB_API_KEY": "k" * 40}


def records(run, variables):
    """Every record of every offline file of a run, in order, by `wandb leet inspect`."""
    found = []
    for path in sorted(run.glob(f"wandb/offline-run-*/run-{run.name}.wandb")):
        argv = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=HANG_S, check=False, env={**variables, "HOME": str(run)}
        )
        assert done.returncode == 0, done.stderr
        found += [json.loads(line) for line in done.stdout.splitlines()]
    return found


def history(found):
    """Name -> list of steps and numbers."""
    points = {}
    for record in found:
        item = record.get("history", {}).get("item", {})
        for name, value in item.items():
            if not name.startswith("_"):
                points.setdefault(name, []).append((item["_step"], value))
    return points


def points_of(run):
    return {name: list(points.items()) for name, points in expected(run).items()}


def test_an_offline_run_has_the_numbers_of_metrics_to_the_last_digit(tmp_path, variables):
    run = tmp_path / "run-1"
    prepare(run, logging=PROJECT)
    (run / "run.json").write_text(json.dumps({"name": "mine", "cluster": "c", "code": {"commit": "abc", "diff": "+"}}))
    (run / "job.json").write_text(json.dumps({"nodes": 2, "points_per_node_hour": 1.5, "points_unit": "ABCI points"}))
    said = train(run, variables=variables)
    found = records(run, variables)
    assert history(found) == points_of(run)
    (about,) = (record["run"] for record in found if "run" in record)
    assert (about["run_id"], about["project"], about["display_name"]) == ("run-1", "p", "mine")
    config = about["config"]["update"]
    cost = {"nodes": "2", "ABCI points per node-hour": "1.5"}
    assert config["origin"] == {"cluster": "c", "commit": "abc", "uncommitted changes": "yes", **cost}
    assert (config["layout"]["world_size"], config["training"]["train_iters"]) == (1, 6)
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(b"kkkk" in text for text in [*texts, said.encode()])


def test_a_run_that_is_killed_and_resumed_has_no_step_twice(tmp_path, variables):
    run = tmp_path / "run-1"
    prepare(run, logging=PROJECT)
    train_until_killed(run, variables)
    train(run, number=2, variables=variables)
    assert "at iteration 4" in log(run, 2)
    found = history(records(run, variables))
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3, 4, 5, 6]
    assert computed(found) == computed(points_of(run))


LOG_100_ROWS = """
import sys
from trainer.config.sections.logging import LoggingConfig
from trainer.trackers.protocol import RunFacts
from trainer.trackers.wandb_run import WandbRun

tracker = WandbRun(LoggingConfig(wandb_project="p", wandb_mode="offline", wandb_save_dir=sys.argv[1]))
assert tracker.begin(RunFacts("r", "r")) == 0
for step in range(1, 101):
    tracker.log(step, {f"number {n}": float(n) for n in range(60)})
tracker.end("completed")
"""


def test_earlier_offline_files_are_read_to_the_last_whole_row(tmp_path, variables):
    from trainer.trackers.wandb_run import steps_of

    argv = [sys.executable, "-c", LOG_100_ROWS, str(tmp_path)]
    subprocess.run(argv, timeout=HANG_S, check=True, cwd=ROOT, env={**variables, "HOME": str(tmp_path)})
    (path,) = tmp_path.glob("wandb/offline-run-*/run-r.wandb")
    content = path.read_bytes()
    # Several blocks, so that some records are divided.
    assert len(content) > 3 * 32768
    assert list(steps_of(path)) == list(range(1, 101))
    path.write_bytes(content[:100_000])
    last = max(steps_of(path))
    assert 0 < last < 100 and list(steps_of(path)) == list(range(1, last + 1))


def test_a_missing_key_is_told_with_the_cure(tmp_path, variables):
    run = tmp_path / "run-1"
    prepare(run, logging={"wandb_project": "p"})
    said = train(run, variables={**variables, "WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "n")})
    assert "logging.wandb_project: Weights & Biases could not begin" in said
    assert "Submit with --secret WANDB_API_KEY, or set logging.wandb_mode: offline; the run goes on" in said
    assert len(rows(run)) == 8
