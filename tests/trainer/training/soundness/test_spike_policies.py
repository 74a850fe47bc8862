"""Runs whose data has one sample of other tokens: its loss is a real spike, and each policy is seen to be kept."""

import json

import numpy as np
import pytest

from tests.trainer.data.token_files import write
from tests.trainer.training.pretraining_job import Job
from tests.trainer.training.test_async_run import log, rows, tensors

ITERS, BATCH = 60, 2
BAD = 77
"""Number of the strange sample before the shuffle."""
WINDOW = 24
"""Half of it has losses when the spike comes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Samples that count up, and one of tokens that occur nowhere else."""
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    strange = np.random.default_rng(0).integers(50, 100, 16).tolist()
    documents = [[(first + step) % 16 for step in range(16)] for first in range(ITERS * BATCH + 1)]
    documents[BAD] = strange
    write(prefix, documents, vocab_size=100)
    return prefix


def begin(run, data, save_interval=10, copies=None, **training):
    values = {
        "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "training": {
            "train_iters": ITERS,
            "seq_length": 16,
            "eval_iters": 0,
            "global_batch_size": BATCH,
            "loss_spike_window": WINDOW,
            **training,
        },
        "optimizer": {"lr": 1e-2},
        "data": {"data_path": [str(data)], "split": "100,0,0"},
        "checkpoint": {"save_interval": save_interval, **(copies or {})},
    }
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))


def train(run, data, ranks=1, number=1, **training):
    begin(run, data, **training)
    with Job(run, ranks, number=number) as job:
        return job.ends(range(ranks))


def spikes(run):
    return [row["iteration"] for row in rows(run) if "loss_spike" in row]


def skipped(run):
    return [row["skipped_iterations"] for row in rows(run) if "skipped_iterations" in row][-1]


def error_of(run, attempt=1):
    return json.loads((run / f"attempts/{attempt}/errors/rank-00000.json").read_text())


@pytest.fixture(scope="module")
def told(data, tmp_path_factory):
    """A run with the default policy, and the iteration of its spike."""
    run = tmp_path_factory.mktemp("told") / "run"
    assert train(run, data) == [0]
    (iteration,) = spikes(run)
    assert WINDOW < iteration < ITERS - 5
    return run, iteration


def test_a_spike_is_told_and_changes_nothing(told, data, tmp_path):
    run, iteration = told
    (row,) = [row for row in rows(run) if "loss_spike" in row]
    assert row["loss_spike"] > 2 * row["loss_before"] > 0
    assert log(run).count(f"the loss of iteration {iteration}, ") == 1
    assert train(tmp_path / "run", data, on_loss_spike="nothing") == [0]
    assert spikes(tmp_path / "run") == []
    assert tensors(run, ITERS) == tensors(tmp_path / "run", ITERS)


def test_no_step_is_made_of_a_spike(told, data, tmp_path):
    """Skipped, its samples leave the weights as if the iteration had been passed over; also soon after a resume."""
    _, iteration = told
    skip, listed, resumed = (tmp_path / name for name in ("skip", "listed", "resumed"))
    assert train(skip, data, ranks=2, on_loss_spike="skip") == [0, 0]
    assert train(listed, data, ranks=2, iterations_to_skip=[iteration]) == [0, 0]
    assert skipped(skip) == skipped(listed) == 1
    assert f"iteration {iteration}: its {BATCH} samples are passed over" in log(listed)
    assert weights(skip) == weights(listed)
    assert train(resumed, data, ranks=2, on_loss_spike="skip", exit_interval=iteration - 1) == [0, 0]
    assert train(resumed, data, ranks=2, number=2, on_loss_spike="skip") == [0, 0]
    assert spikes(resumed) == [iteration]
    assert weights(resumed) == weights(skip)


def weights(run):
    """Hashes of the files of the model; those of the optimizer and of the progress have their counters."""
    return {name: value for name, value in tensors(run, ITERS).items() if name.startswith("model")}


def test_a_run_is_stopped_at_a_spike(told, data, tmp_path):
    _, iteration = told
    assert train(tmp_path / "run", data, on_loss_spike="stop") == [1]
    error = error_of(tmp_path / "run")
    assert error["type"] == "LossSpikeError"
    assert f"the loss of iteration {iteration}, " in error["message"]
    assert f"the newest checkpoint is that of iteration {(iteration - 1) // 10 * 10}" in error["message"]


def test_a_run_is_rolled_back_and_passes_over_the_samples(told, data, tmp_path):
    """The next attempt ends with the weights of a run that has passed over these iterations from the beginning."""
    _, iteration = told
    saved = (iteration - 1) // 10 * 10
    run, listed = tmp_path / "run", tmp_path / "listed"
    policy = {"on_loss_spike": "roll_back"}
    assert 1 in train(run, data, ranks=2, **policy)
    assert error_of(run)["type"] == "RollBackError"
    assert json.loads((run / "checkpoints/passed_over.json").read_text()) == {"iterations": [[saved + 1, iteration]]}
    assert train(run, data, ranks=2, number=2, **policy) == [0, 0]
    assert train(listed, data, ranks=2, iterations_to_skip=list(range(saved + 1, iteration + 1))) == [0, 0]
    assert tensors(run, ITERS) == tensors(listed, ITERS)


def test_no_copy_newer_than_the_checkpoint_is_used_after_a_roll_back(told, data, tmp_path):
    _, iteration = told
    run, listed, folder = tmp_path / "run", tmp_path / "listed", tmp_path / "copies"
    saved = (iteration - 1) // 20 * 20
    copies = {"copy_interval": 3, "copy_folder": str(folder)}
    policy = {"on_loss_spike": "roll_back", "save_interval": 20, "copies": copies}
    assert train(run, data, **policy) == [1]
    assert any(int(path.name.split(".")[1][5:]) > saved for path in (folder / "llmctl-copies-run").glob("rank-*"))
    assert train(run, data, number=2, **policy) == [0]
    line = f"goes on from no copy in {folder}: attempt 1 has ended by losses or weights that are not sound; "
    assert f"{line}the newest checkpoint is that of iteration {saved}" in log(run, 2)
    assert train(listed, data, iterations_to_skip=list(range(saved + 1, iteration + 1))) == [0]
    assert tensors(run, ITERS) == tensors(listed, ITERS)


def test_a_second_spike_soon_after_ends_the_run(told, data, tmp_path):
    _, iteration = told
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/passed_over.json").write_text(json.dumps({"iterations": [[iteration - 2, iteration - 1]]}))
    assert train(run, data, on_loss_spike="roll_back") == [1]
    error = error_of(run)
    assert error["type"] == "LossSpikeError"
    assert f"soon after iterations {iteration - 2} to {iteration - 1}" in error["message"]


@pytest.mark.parametrize("text", ["{", '{"iterations": [[3, 2]]}', '{"iterations": [1]}', "[]"])
def test_a_damaged_list_is_told(data, tmp_path, text):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/passed_over.json").write_text(text)
    assert train(run, data) == [1]
    assert "passed_over.json, the iterations that this run passes over" in error_of(run)["message"]


def test_status_tells_the_newest_spike(told):
    from llmctl.runs.metrics import MetricsTable
    from llmctl.runs.view import spike_words

    run, iteration = told
    table = MetricsTable()
    for row in rows(run):
        table.add(row)
    assert spike_words(table).startswith(f"the loss of iteration {iteration} was a spike, ")
    table.add({**rows(run)[0], "attempt": 2})
    assert spike_words(table) == ""
