"""Training lines by wall time or by iteration, alone and in runs of two ranks."""

import pytest

from tests.resume_torture import rows
from tests.trainer.training.test_pretraining import end, log, start
from trainer.process.metrics import training_line
from trainer.training.training_lines import FIRST_LINES, SECONDS_PER_LINE, TrainingLines


def row(iteration, **values):
    row = {"iteration": iteration, "lm_loss": float(iteration), "iteration_time_s": 1.0, "tokens_per_s": 100.0}
    return {**row, "mfu": None, "grad_norm": 1.0, "skipped_iterations": 0, "nan_iterations": 0, **values}


def test_the_first_lines_come_at_once_and_the_others_by_the_clock():
    now = [1000.0]
    lines = TrainingLines(None, clock=lambda: now[0])
    shown = []
    for iteration in range(1, 101):
        now[0] += SECONDS_PER_LINE / 20
        if lines.next_line(row(iteration), is_last=iteration == 100) is not None:
            shown.append(iteration)
    assert shown == [*range(1, FIRST_LINES + 1), 25, 45, 65, 85, 100]


def test_every_slow_iteration_has_a_line():
    now = [0.0]
    lines = TrainingLines(None, clock=lambda: now[0])
    for iteration in range(20):
        now[0] += SECONDS_PER_LINE
        assert lines.next_line(row(iteration), is_last=False) is not None


def test_a_line_has_the_means_since_the_line_before():
    lines = TrainingLines(None, clock=lambda: 0.0)
    for iteration in range(FIRST_LINES):
        assert lines.next_line(row(iteration), is_last=False) == row(iteration)
    assert lines.next_line(row(6, mtp_1_loss=4.0, mfu=0.4), is_last=False) is None
    assert lines.next_line(row(7, mtp_1_loss=4.0, mfu=0.4, lm_loss=None), is_last=False) is None
    slow = row(9, mtp_1_loss=4.0, mfu=0.1, iteration_time_s=4.0, tokens_per_s=25.0)
    mean = lines.next_line(slow, is_last=True)
    expected = row(9, lm_loss=7.5, mtp_1_loss=4.0, iteration_time_s=2.0, tokens_per_s=50.0, mfu=0.2)
    assert mean == pytest.approx(expected)
    assert training_line(mean, 10) == "9/10  loss 7.5000  mtp 1 loss 4.0000  grad 1.000  50 tok/s  MFU 20.0%  ETA 0:02"


def test_a_set_log_interval_prints_every_row():
    lines = TrainingLines(1, clock=lambda: 0.0)
    assert all(lines.next_line(row(number), is_last=False) == row(number) for number in range(50))


def test_metrics_have_every_iteration_whatever_is_printed(tmp_path):
    keys = {"train_iters": 20, "eval_iters": 0}
    for name, interval in (("each", 1), ("unset", None)):
        with start(tmp_path / name, "tp2", training=keys, logging={"log_interval": interval}) as attempt:
            assert end(attempt) == [0, 0]
        assert [iteration for iteration, _ in rows(tmp_path / name)] == list(range(1, 21))
    losses = [[found["lm_loss"] for found in rows(tmp_path / name).values()] for name in ("each", "unset")]
    assert losses[0] == losses[1]
    printed = [sum("  loss " in line for line in log(tmp_path / name).splitlines()) for name in ("each", "unset")]
    assert printed[0] == 20 and FIRST_LINES < printed[1] < 20
    assert "\n20/20  loss " in log(tmp_path / "unset")
