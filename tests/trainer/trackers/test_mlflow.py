"""Runs of MLflow, read by its own client, and compared with metrics.jsonl."""

import pytest

from tests.trainer.trackers.tracked_run import computed, expected, log, prepare, train, train_until_killed

mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Address of a store of files, which needs no server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return f"file:{tmp_path / 'store'}"


VARIABLES = {"MLFLOW_ALLOW_FILE_STORE": "true"}


def read(server, run_id):
    """The run, and name -> list of steps and numbers."""
    client = mlflow.MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`llmctl.run_id` = '{run_id}'")
    names = list(run.data.metrics)
    history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return run, {name: sorted((point.step, point.value) for point in points) for name, points in history.items()}


def points_of(run):
    return {name: list(points.items()) for name, points in expected(run).items()}


def test_a_run_has_the_numbers_of_metrics_to_the_last_digit(tmp_path, server):
    run = tmp_path / "run-1"
    prepare(run, logging={"mlflow_tracking_uri": server, "mlflow_experiment": "e", "mlflow_run_name": "mine"})
    train(run, variables=VARIABLES)
    found, points = read(server, "run-1")
    assert points == points_of(run)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "mine")
    assert found.data.params["training.train_iters"] == "6"
    assert found.data.tags["layout.world_size"] == "1"


def test_a_run_that_is_killed_and_resumed_has_no_step_twice(tmp_path, server):
    run = tmp_path / "run-1"
    prepare(run, logging={"mlflow_tracking_uri": server, "mlflow_experiment": "e"})
    train_until_killed(run, VARIABLES)
    train(run, number=2, variables=VARIABLES)
    assert "at iteration 4" in log(run, 2)
    found, points = read(server, "run-1")
    assert [step for step, _ in points["lm loss"]] == [1, 2, 3, 4, 5, 6]
    assert computed(points) == computed(points_of(run))
    assert found.info.status == "FINISHED"
