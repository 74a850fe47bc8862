"""Rows of whole runs of two ranks: the further numbers that the config requests."""

import json

import pytest

from tests.resume_torture import Attempt, config_of, rows


def train(run, variant, **changes):
    """Training rows of a completed run."""
    values = config_of(variant)
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))
    with Attempt(run, 1) as attempt:
        assert attempt.finish() == "completed"
    return {iteration: row for (iteration, is_valid), row in rows(run).items() if not is_valid}


TRAINING = {"train_iters": 4, "eval_iters": 0}


def test_numbers_are_in_every_row_or_at_their_interval(tmp_path):
    asked = {"log_params_norm": True, "log_num_zeros_in_grad": True}
    found = train(tmp_path / "each", "tp2", training=TRAINING, logging=asked)
    assert all(row["params_norm"] > 0 and row["num_zeros_in_grad"] >= 0 for row in found.values())
    other = train(tmp_path / "some", "tp2", training=TRAINING, logging={"log_layer_norms": True, "numbers_interval": 3})
    assert [iteration for iteration, row in other.items() if "layer_grad_norms" in row] == [3]
    total = sum(norm**2 for norm in other[3]["layer_grad_norms"].values()) ** 0.5
    assert total == pytest.approx(found[3]["grad_norm"], rel=1e-5)
