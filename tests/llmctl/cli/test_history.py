"""``llmctl list`` and ``llmctl runs rm``, on real run directories."""

import json
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.job_state import JobState


@pytest.fixture
def runs(own_folders: Path, capsys) -> Path:
    """Two runs that ended, on a cluster of this machine whose nodes cost points."""
    profile = own_folders / "config/llmctl/clusters/here.yaml"
    profile.parent.mkdir(parents=True)
    kind = {"gpus": 0, "points_per_hour": 6.0}
    values = {"scheduler": "local", "runs_root": f"{own_folders}/runs", "defaults": {"resource_type": "cpu"}}
    profile.write_text(yaml.safe_dump({**values, "resource_types": {"cpu": kind}}))
    for name, command in (("good", "true"), ("bad", "false")):
        main(["submit", "--cluster", "here", "--run-id", name, "--follow", "--", command])
    capsys.readouterr()
    # As long as an hour and a half, over two attempts.
    for attempt, (start, end) in {"1": (1000, 4600), "2": (9000, 10800)}.items():
        folder = own_folders / f"runs/good/attempts/{attempt}"
        folder.mkdir(exist_ok=True)
        for file, at in (("started.json", start), ("exit.json", end)):
            known = folder.parent / "1" / file
            (folder / file).write_text(json.dumps({**json.loads(known.read_text()), "time": at}))
    return own_folders / "runs"


def documents(capsys, *arguments: str) -> dict[str, dict]:
    assert main(["list", "--json", *arguments]) == 0
    return {run["run_id"]: run for run in json.loads(capsys.readouterr().out)["runs"]}


def test_runs_are_listed_with_all_attempts_and_their_cost(runs, capsys):
    assert list(documents(capsys)) == ["bad", "good"]
    found = documents(capsys, "--state", "completed")
    assert list(found) == ["good"] and found["good"]["node_hours"] == pytest.approx(1.5)
    assert (found["good"]["points"], found["good"]["unit"]) == (pytest.approx(9.0), "points")
    assert list(documents(capsys, "--name", "ba")) == ["bad"]
    assert list(documents(capsys, "--since", "1h")) == ["bad", "good"]
    assert list(documents(capsys, "-n", "1")) == ["bad"]
    assert documents(capsys, "--cluster", "local") == {}
    assert main(["list"]) == 0
    shown = capsys.readouterr()
    header, bad, good = shown.out.splitlines()
    assert header.split() == [
        *("RUN", "CLUSTER", "STATE", "ITERATION", "LOSS", "CREATED", "NODES", "NODE-HOURS", "COST"),
    ]
    assert bad.startswith("bad ") and good.endswith("9.0 points") and runs.is_dir()
    assert shown.err.startswith("2 runs: 1.50 node-hours, 9.0 points")


@pytest.mark.usefixtures("runs")
def test_wrong_filters_are_told(capsys):
    assert main(["list", "--state", "done"]) == 2
    assert "the states are pending" in capsys.readouterr().err
    assert main(["list", "--since", "yesterday"]) == 2
    assert "units, as in" in capsys.readouterr().err
    assert main(["list", "--name", "none"]) == 0
    assert capsys.readouterr().err == "there are no such runs\n"


def test_files_of_an_ended_run_are_removed_and_its_record_stays(runs, capsys):
    (runs / "good/checkpoints/iter_0000001").mkdir(parents=True)
    (runs / "good/checkpoints/iter_0000001/x.safetensors").write_bytes(b"x" * 3_000_000)
    (runs / "good/results.csv").write_text("of the command")
    assert main(["runs", "rm", "good"]) == 2
    assert "add --yes" in capsys.readouterr().err and (runs / "good/checkpoints").is_dir()
    assert main(["runs", "rm", "good", "--yes"]) == 0
    assert "good: checkpoints, code in" in capsys.readouterr().err
    assert sorted(path.name for path in (runs / "good").iterdir() if path.name in ("checkpoints", "code")) == []
    assert (runs / "good/results.csv").read_text() == "of the command"
    assert (runs / "good/run.json").is_file() and (runs / "good/attempts/1/exit.json").is_file()
    assert main(["status", "good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == JobState.COMPLETED.value
    assert main(["runs", "rm", "good", "--yes"]) == 0
    assert "good: nothing in" in capsys.readouterr().err
    assert (runs / "bad/code").is_dir()


@pytest.mark.usefixtures("own_folders")
def test_files_of_a_run_that_goes_on_stay(capsys):
    assert main(["submit", "--run-id", "long", "--", "sleep", "600"]) == 0
    try:
        assert main(["runs", "rm", "long", "--yes"]) != 0
        assert "is still" in capsys.readouterr().err
    finally:
        assert main(["cancel", "long", "--grace", "0"]) == 0
