"""Logs, metrics, predictions and lists of runs, as the commands give them; and the example."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llmctl
from llmctl.cli.main import main
from tests.llmctl.cli.test_plan import CONFIG, KEYS, place
from tests.llmctl.operate.report.made_runs import add, made_run, trained
from tests.llmctl.watch.test_real_run import context_of
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
__all__ = ["place"]


def document_of(capsys, *words):
    """The document of a command, as JSON."""
    assert main([*words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def resumed(home):
    """A run of 40 steps that failed at step 34 and went back to step 20."""
    made = trained(made_run(home / "runs", "made-261127-120000-abcd", created=1000.0), resumes_at=21)
    add(context_of(home), made)
    return llmctl.Run("made")


def test_metrics_have_each_step_once(resumed, capsys):
    rows = resumed.metrics()
    assert rows["iteration"] == [*range(1, 41)]
    assert rows["attempt"] == [1] * 20 + [2] * 20
    assert rows["lm_loss"] == [pytest.approx(3.0 + 8 / step) for step in range(1, 41)]
    assert "valid_loss" not in rows and {len(column) for column in rows.values()} == {40}
    assert sorted(resumed.metrics("lm_*", "grad_norm")) == ["attempt", "grad_norm", "iteration", "lm_loss"]
    valid = resumed.metrics(validation=True)
    assert (valid["iteration"], valid["valid_loss"]) == ([40], [pytest.approx(3.1)]) and "lm_loss" not in valid
    assert capsys.readouterr() == ("", "")


def test_a_number_that_a_row_lacks_is_nan(resumed):
    with (resumed.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 2, "iteration": 41, "lm_loss": 3.0, "fencing_token": 2}) + "\n")
    norms = resumed.metrics("grad_norm")["grad_norm"]
    assert len(norms) == 41 and math.isnan(norms[-1]) and not math.isnan(norms[0])


def test_a_run_without_rows_has_empty_columns(home):
    add(context_of(home), made_run(home / "runs", "none-261127-120000-abcd", created=1.0))
    assert llmctl.run("none").metrics() == {"iteration": [], "attempt": []}


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ([], {}),
        (["--job"], {"job": True}),
        (["--rank", "1", "--attempt", "1"], {"rank": 1, "attempt": 1}),
        (["--rank", "failed", "--attempt", "1"], {"rank": "failed", "attempt": 1}),
        (["--rank", "1,2", "--attempt", "1"], {"rank": [1, 2], "attempt": 1}),
        (["--attempt", "7"], {"attempt": 7}),
        (["--rank", "x"], {"rank": "x"}),
        (["--rank", "1", "--job"], {"rank": 1, "job": True}),
        (["--rank", "1", "--attempt", "1", "-n", "1"], {"rank": 1, "attempt": 1, "lines": 1}),
    ],
)
def test_logs_are_those_of_the_command(resumed, capsys, caplog, words, arguments):
    code = main(["logs", "made", *words])
    out, err = capsys.readouterr()
    if code:
        with pytest.raises(llmctl.LlmctlError) as caught:
            resumed.logs(**arguments)
        assert (code, err) == (caught.value.exit_code, f"llmctl: {caught.value}\n")
        return
    with caplog.at_level("INFO", "llmctl"):
        assert "".join(f"{line}\n" for line in resumed.logs(**arguments)) == out
    assert "".join(f"{record.getMessage()}\n" for record in caplog.records) == err
    assert out or err


def test_status_is_that_of_the_command(resumed, capsys, frozen_time):
    (shown,) = document_of(capsys, "status", "made")["runs"]
    ours = {**resumed.status().as_json(), "run_dir": str(resumed.run_dir)}
    assert frozen_time and json.loads(json.dumps(ours)) == shown


def test_runs_are_those_of_the_list(resumed, capsys, frozen_time):
    add(context_of(resumed.run_dir.parents[1]), trained(made_run(resumed.run_dir.parent, "two-1", created=2000.0)))
    for words, filters in (([], {}), (["--name", "made"], {"name": "made"}), (["-n", "1"], {"most": 1})):
        shown = document_of(capsys, "list", *words)["runs"]
        assert json.loads(json.dumps([run.as_json() for run in llmctl.runs(**filters)])) == shown and frozen_time
    assert [run.run_id for run in llmctl.runs(state=llmctl.JobState.COMPLETED)] == ["two-1", resumed.run_id]
    assert llmctl.runs(state="failed") == llmctl.runs(cluster="other") == llmctl.runs(since="1h") == []
    assert main(["list", "--state", "odd"]) == 2
    with pytest.raises(llmctl.UsageError) as caught:
        llmctl.runs(state="odd")
    assert capsys.readouterr().err == f"llmctl: {caught.value}\n"


@pytest.mark.usefixtures("place")
def test_a_prediction_is_that_of_the_command(capsys):
    shown = document_of(capsys, "plan", "c.yaml", "--cluster", "bed", "--nodes", "2", "--set", "optimizer.lr=1")
    asked = {"cluster": "bed", "nodes": 2, "set": {"optimizer.lr": 1}}
    assert llmctl.plan("c.yaml", **asked).as_json() == llmctl.plan(CONFIG, **asked).as_json() == shown
    assert list(shown) == KEYS
    assert not llmctl.plan(CONFIG, device="V100-16GB", gpus_per_node=1, set={"model.num_layers": 400}).fits
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--device", "X1"], {"device": "X1"}),
        (["--device", "H100", "--cluster", "bed"], {"device": "H100", "cluster": "bed"}),
        (["--cluster", "nowhere"], {"cluster": "nowhere"}),
        (["--cluster", "bed", "--set", "model.layers=1"], {"cluster": "bed", "set": {"model.layers": 1}}),
    ],
)
def test_a_prediction_fails_as_the_command_does(capsys, words, arguments):
    code = main(["plan", "c.yaml", *words])
    with pytest.raises(llmctl.LlmctlError) as caught:
        llmctl.plan("c.yaml", **arguments)
    assert (code, capsys.readouterr().err) == (caught.value.exit_code, f"llmctl: {caught.value}\n") and code > 1


def test_the_example_runs(home):
    words = [sys.executable, str(ROOT / "examples/python_api.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (path for path in (home / "runs").iterdir() if not path.name.startswith("."))
    said = done.stdout
    assert f"{run_dir.name}: 20 iterations, loss " in said and f"{run_dir.name}: 40 iterations, loss " in said
    assert f"{run_dir.name} has not ended after 1 s: " in said and f"{run_dir.name}: cancelled" in said
