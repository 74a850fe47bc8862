"""Rows of metrics.jsonl, field by field, and lines of the console."""

import json
import math

import pytest

from trainer.process.metrics import (
    MetricsFile,
    SpeedScale,
    training_line,
    training_row,
    validation_line,
    validation_row,
)
from trainer.process.progress import TrainingProgress
from trainer.process.run_lock import RunLock

SPEED = SpeedScale(tokens_per_iteration=1000, flops_per_token=6_000_000_000, devices=4, peak_tflops=10.0)


def row(**keys):
    progress = TrainingProgress(
        iteration=120,
        consumed_samples=240,
        consumed_tokens=4800,
        skipped_iterations=2,
        interval_iterations=2,
        interval_loss=30.0,
        interval_tokens=10,
        **keys,
    )
    return training_row(
        3,
        progress,
        SPEED,
        grad_norm=0.871,
        learning_rate=2.95e-4,
        loss_scale=1.0,
        iteration_time_s=0.5,
        peak_memory_bytes=1 << 30,
    )


def test_training_row_has_exactly_the_agreed_fields():
    fields = (
        "attempt iteration consumed_samples consumed_tokens lm_loss grad_norm learning_rate loss_scale "
        "iteration_time_s tokens_per_s tflops_per_device mfu peak_memory_bytes skipped_iterations nan_iterations time"
    )
    assert list(row()) == fields.split()
    assert row()["lm_loss"] == 3.0
    assert row()["tokens_per_s"] == 2000.0
    assert row()["tflops_per_device"] == pytest.approx(3.0)
    assert row()["mfu"] == pytest.approx(0.3)


def test_further_losses_are_means_over_their_own_labels():
    found = row(further_losses={"mtp_1_loss": [12.0, 4.0], "mtp_2_loss": [0.0, 0.0]})
    assert found["mtp_1_loss"] == 3.0 and "mtp_2_loss" not in found
    assert "loss 3.0000  mtp 1 loss 3.0000  grad" in training_line(found, 200)


def test_progress_keeps_further_losses():
    progress, again = TrainingProgress(seed=4), TrainingProgress()
    again.load(json.loads(json.dumps(progress.state())))
    assert again == progress and "further_losses" not in progress.state()
    for _ in range(2):
        progress.add_further_loss("mtp_1_loss", 0.1, 3)
    again.load(json.loads(json.dumps(progress.state())))
    assert again.further_losses == {"mtp_1_loss": [0.2, 6.0]}
    again.begin_interval()
    assert not again.further_losses


def test_validation_row():
    found = validation_row(1, 20, math.log(50.0))
    assert list(found) == ["attempt", "iteration", "valid_loss", "valid_ppl", "time"]
    assert found["valid_ppl"] == pytest.approx(50.0)
    assert validation_line(found, 100) == "20/100  validation loss 3.9120  perplexity 50.00"
    nothing = validation_row(1, 20, None)
    assert (nothing["valid_loss"], nothing["valid_ppl"]) == (None, None)
    assert validation_line(nothing, 100) == "20/100  validation loss none  perplexity none"


def test_console_line():
    line = training_line({**row(), "skipped_iterations": 0}, 600)
    assert line == "120/600  loss 3.0000  grad 0.871  2,000 tok/s  MFU 30.0%  ETA 4:00"
    long = {
        **row(),
        "skipped_iterations": 0,
        "iteration": 100_000,
        "tokens_per_s": 1_234_567.0,
        "iteration_time_s": 0.2,
    }
    assert len(training_line(long, 300_000)) <= 80
    troubled = {**row(nan_iterations=1), "lm_loss": None, "grad_norm": None, "mfu": None, "tflops_per_device": 0.00321}
    line = training_line(troubled, 600)
    assert "loss none  grad none" in line
    assert "2 skipped" in line
    assert "1 not finite" in line
    assert "MFU" not in line


def test_rows_are_appended_after_an_incomplete_one_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    file = MetricsFile(path)
    file.append({"iteration": 2, "lm_loss": math.nan, "valid_ppl": math.inf, "metrics": {"own": -math.inf}})
    file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"iteration": 1}, {"iteration": 2, "lm_loss": None, "valid_ppl": None, "metrics": {"own": None}}]


def test_no_row_is_written_without_the_lock(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLock(tmp_path / "lock") as lock:
        lock.acquire()
        file = MetricsFile(path, lock)
        file.append({"iteration": 1})
        (tmp_path / "lock" / "2.json").write_text("{}")
        file.append({"iteration": 2})
        file.close()
        assert lock.is_known_lost
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"iteration": 1, "fencing_token": 1}]
