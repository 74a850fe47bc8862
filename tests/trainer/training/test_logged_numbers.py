"""Rows of whole runs of two ranks: the further numbers that the config requests."""

import json
import subprocess
import sys

import pytest

from tests.llmctl.documents import problems_of
from tests.resume_torture import Attempt, config_of
from tests.waiting import HANG_S


def train(run, variant, **changes):
    """Training rows of a completed run."""
    values = config_of(variant)
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))
    with Attempt(run, 1) as attempt:
        assert attempt.finish() == "completed"
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [problem for row in found for problem in problems_of("metrics", row)] == []
    return {row["iteration"]: row for row in found if "lm_loss" in row}


TRAINING = {"train_iters": 4, "eval_iters": 0}


def test_each_row_of_a_run_is_as_the_schema_says(tmp_path):
    rows = train(tmp_path / "run", "tp2", training={"train_iters": 4, "eval_interval": 2})
    assert [*rows] == [1, 2, 3, 4]
    text = (tmp_path / "run/metrics.jsonl").read_text()
    row = next(row for row in map(json.loads, text.splitlines()) if "valid_ppl" in row)
    assert problems_of("metrics", {**row, "valid_mtp_2_loss": 1.0}) == []
    for wrong in ({"more": 1}, {"iteration": "2"}, {"valid_loss": "nan"}, {"tasks": {"one": 1.0}}):
        assert problems_of("metrics", {**row, **wrong}), wrong
    del row["attempt"]
    assert problems_of("metrics", row)


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


def test_timers_memory_and_sizes(tmp_path):
    asked = {"log_memory": True, "log_batch_size": True, "log_world_size": True, "timing_log_level": 2}
    found = train(tmp_path / "run", "pp2", training=TRAINING, logging=asked)
    for row in found.values():
        assert (row["batch_size"], row["world_size"]) == (8, 2)
        assert row["memory_allocated_bytes"] > 0
        assert "memory_reserved_bytes" not in row
        times = row["timers_s"]
        assert all(0.0 < part["min"] <= part["max"] for part in times.values())
        parts = ("forward_compute", "backward_compute", "pipeline_communication", "gradient_sync")
        assert max(times[part]["max"] for part in parts) < times["forward_backward"]["max"]
        assert times["forward_backward"]["min"] + times["optimizer"]["min"] < row["iteration_time_s"]


def test_memory_of_a_process_on_the_cpu():
    """A process of its own: in this one, memory of earlier tests may be given back meanwhile."""
    program = (
        "import torch; from trainer.process.device import memory_bytes; device = torch.device('cpu'); "
        "before = memory_bytes(device)['memory_allocated_bytes']; held = torch.ones(64 << 20, dtype=torch.uint8); "
        "print(memory_bytes(device)['memory_allocated_bytes'] - before)"
    )
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert 48 << 20 < int(grown.stdout) < 96 << 20
