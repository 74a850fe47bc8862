"""Runs that go on without a save or without finite gradients, and end at their limits. Real processes, real files."""

from __future__ import annotations

import itertools
import json
import math
import resource
import signal

import pytest

from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.directory import complete_iterations
from trainer.process.heartbeat import Heartbeat
from trainer.training.missed_saves import MissedSaves
from trainer.training.soundness.skipped_steps import SkippedSteps


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
    says = "losses or gradients of the last 5 steps (training.max_skipped_steps 5) up to iteration 6 were not finite"
    assert says in error["message"]
    assert rows(run)[-1]["nan_iterations"] == 5
    assert complete_iterations(run / "checkpoints") == []


def test_a_run_without_a_finite_loss_at_its_end_is_not_completed(tmp_path):
    run = tmp_path / "run"
    spoils = {"lr": 1e30, "lr_warmup_iters": 0, "clip_grad": 0, "optimizer": "sgd"}
    write_config(run, spoils, training={"train_iters": 3, "max_skipped_steps": 0})
    with Job(run, 1) as job:
        assert job.ends([0]) == [1]
    assert error_of(run)["message"].startswith("losses or gradients of all the last 2 steps up to iteration 3")
    assert not (run / "attempts/1/outcome.json").exists()


def spoil_nine_of_ten():
    """Make the gradients of nine of ten steps NaN."""
    from trainer.training import loop

    forward_backward, steps = loop.forward_backward, itertools.count()

    def spoiled(*arguments, loss_scale, **named):
        scale = loss_scale if next(steps) % 10 == 0 else math.nan
        return forward_backward(*arguments, loss_scale=scale, **named)

    loop.forward_backward = spoiled


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_steps_that_are_mostly_skipped_end_the_run(tmp_path, precision):
    """Those that search for the loss scale of fp16 do not count: four of them fall from 16 to 1."""
    run = tmp_path / "run"
    is_fp16 = precision == "fp16"
    write_config(run, training={"fp16": is_fp16, "initial_loss_scale": 16.0, "hysteresis": 1})
    with Job(run, 1, {0: spoil_nine_of_ten}) as job:
        assert job.ends([0]) == [1]
    error = error_of(run)
    assert error["type"] == "NonFiniteError"
    assert "losses or gradients of 11 of the last " in error["message"]
    assert "skipped_steps_window 20" in error["message"]
    key = "skipped_iterations" if is_fp16 else "nan_iterations"
    assert rows(run)[-1][key] == (11 + 4 if is_fp16 else 11)


def test_skipped_steps_reach_a_limit_in_a_row_or_within_the_window():
    def excess(steps, *limits):
        counted = SkippedSteps(*limits)
        for step in steps:
            counted.add(step == "x")
        return counted.excess

    assert excess("xx.x..", 3, None) == ""
    assert excess("x.xx.x", 3, None).startswith("4 of the last 6 steps")
    assert excess("x.xx.......x", 3, None) == ""
    assert excess("xxx", 3, None).startswith("the last 3 steps")
    assert excess("x.xx.x", 3, 0) == ""
    assert excess("xxx", 3, 0)
    assert excess("x" * 100, 0, None) == ""
    assert excess("x", 1, None)


def limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, resource.RLIM_INFINITY))


def test_a_disk_that_refuses_saves_ends_the_run_at_the_limit(tmp_path):
    run = tmp_path / "run"
    write_config(run, checkpoint={"save_interval": 2, "max_missed_saves": 3, "missed_saves_grace_s": 0})
    with Job(run, 1, {0: limit_file_size}) as job:
        assert job.ends([0]) == [1]
    missed = [row for row in rows(run) if "missed_save" in row]
    assert [row["iteration"] for row in missed] == [2, 4, 6]
    assert "the checkpoint of iteration 2 could not be written" in missed[0]["missed_save"]
    assert "File too large" in error_of(run)["message"]
    beat = json.loads((run / "attempts/1/heartbeat/rank-00000.json").read_text())
    # The error has the sentence, and status shows both.
    assert beat["warning"].startswith("3 missed saves in a row, in ")
    assert complete_iterations(run / "checkpoints") == []


def test_misses_within_the_grace_period_end_no_run(tmp_path):
    run = tmp_path / "run"
    write_config(run, checkpoint={"save_interval": 2, "max_missed_saves": 3, "missed_saves_grace_s": 1e6})
    with Job(run, 1, {0: limit_file_size}) as job:
        assert job.ends([0]) == [1]
    missed = [row["iteration"] for row in rows(run) if "missed_save" in row]
    # Only the save at the end must succeed.
    assert missed == [*range(2, 41, 2), 40]


def test_missed_saves_are_too_many_by_number_and_time(monkeypatch):
    times = [0.0]
    monkeypatch.setattr("trainer.training.missed_saves.time.monotonic", lambda: times[0])
    missed = MissedSaves(most=2, grace_s=600.0)
    answers = []
    for times[0] in (100.0, 300.0, 699.0, 700.0):
        missed.add()
        answers.append(missed.are_too_many)
    assert answers == [False, False, False, True]
    assert str(missed) == "4 missed saves in a row, in 600 s; 2 that last 600 s end the run"
    missed.reset()
    times[0] = 5000.0
    missed.add()
    assert not missed.are_too_many
    times[0] = 6000.0
    # A run that saves rarely goes on until the number is reached too.
    assert not missed.are_too_many
    missed.add()
    assert missed.are_too_many
    unlimited = MissedSaves(most=None, grace_s=0.0)
    unlimited.add()
    assert not unlimited.are_too_many


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
