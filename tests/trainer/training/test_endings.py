"""Runs that go on without a save or without finite gradients, and end at their limits. Real processes, real files."""

from __future__ import annotations

import json
import resource
import signal

import pytest

from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.directory import complete_iterations
from trainer.process.heartbeat import Heartbeat


def write_config(run, optimizer=None, **sections):
    values = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "training": {"train_iters": 40, "seq_length": 16, "eval_iters": 0, **sections.pop("training", {})},
        "optimizer": {"lr": 1e-3, **(optimizer or {})},
        "data": {"mock_data": True},
        **sections,
    }
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def error_of(run, rank=0):
    return json.loads((run / f"attempts/1/errors/rank-{rank:05d}.json").read_text())


def test_steps_without_finite_gradients_end_the_run(tmp_path):
    """The first step makes the weights useless, after a save of every step but those that were skipped."""
    run = tmp_path / "run"
    spoils = {"lr": 1e30, "lr_warmup_iters": 0, "clip_grad": 0, "optimizer": "sgd"}
    checkpoint = {"save_interval": 2, "keep_last": 1}
    write_config(run, spoils, training={"max_skipped_steps": 5}, checkpoint=checkpoint)
    with Job(run, 1) as job:
        assert job.ends([0]) == [1]
    error = error_of(run)
    assert error["type"] == "NonFiniteError"
    assert "the gradients of the last 5 steps, up to iteration 6, were not finite" in error["message"]
    assert "training.max_skipped_steps 5" in error["message"]
    assert rows(run)[-1]["nan_iterations"] == 5
    assert complete_iterations(run / "checkpoints") == []


def limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, resource.RLIM_INFINITY))


def test_a_disk_that_refuses_saves_ends_the_run_at_the_limit(tmp_path):
    run = tmp_path / "run"
    write_config(run, checkpoint={"save_interval": 2, "max_missed_saves": 3})
    with Job(run, 1, {0: limit_file_size}) as job:
        assert job.ends([0]) == [1]
    missed = [row for row in rows(run) if "missed_save" in row]
    assert [row["iteration"] for row in missed] == [2, 4, 6]
    assert "the checkpoint of iteration 2 could not be written" in missed[0]["missed_save"]
    assert "File too large" in error_of(run)["message"]
    beat = json.loads((run / "attempts/1/heartbeat/rank-00000.json").read_text())
    assert beat["warning"].endswith("3 of 3 missed saves in a row")
    assert complete_iterations(run / "checkpoints") == []


def test_a_heartbeat_needs_no_room_on_the_disk(tmp_path, monkeypatch):
    """A disk without room for a new file, simulated: the file is overwritten in place."""
    path = tmp_path / "rank-00000.json"
    with Heartbeat(path, 0) as heartbeat:
        inode = path.stat().st_ino

        def refuse(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("trainer.process.heartbeat.write_json", refuse)
        heartbeat.beat(7, "checkpoint")
        heartbeat.warn("x" * 5000)
        heartbeat._write()
        beat = json.loads(path.read_text())
        assert (beat["iteration"], beat["phase"], len(beat["warning"])) == (7, "checkpoint", 1000)
        heartbeat.warn("")
        heartbeat._write()
        assert "warning" not in json.loads(path.read_text())
        assert path.stat().st_ino == inode


@pytest.mark.parametrize(("scale", "minimum", "can"), [(4.0, 1.0, True), (1.0, 1.0, False)])
def test_the_search_for_a_loss_scale_is_known(scale, minimum, can):
    from trainer.optimizer.loss_scaler import LossScaler

    assert LossScaler(scale=scale, min_scale=minimum, window=10).can_fall is can
    assert LossScaler(scale=scale, min_scale=minimum).can_fall is False
