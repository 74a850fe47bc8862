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


def test_rows_of_experts_show_their_auxiliary_losses(tmp_path):
    experts = {"num_experts": 4, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    each = train(tmp_path / "each", "tp2", training=TRAINING, model=experts, logging={"moe_per_layer_logging": True})
    for row in each.values():
        for name in ("load_balancing_loss", "z_loss"):
            of_layers = [numbers[name] for numbers in row["moe_layers"].values()]
            assert row[name] == pytest.approx(sum(of_layers) / len(of_layers), rel=1e-9)
    # Without a request: means over the interval, nothing by layer, and a line of the console as short as ever.
    whole = train(tmp_path / "whole", "tp2", training=TRAINING, model=experts, logging={"log_interval": 4})
    assert whole[4]["z_loss"] == pytest.approx(sum(row["z_loss"] for row in each.values()) / 4, rel=1e-9)
    assert "moe_layers" not in whole[4]
    assert "z loss" not in (tmp_path / "whole/attempts/1/rank-00000.log").read_text()
