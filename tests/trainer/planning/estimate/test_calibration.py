"""Factors from measured runs: known ones are found again, and what the runs do not say stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner_rows.calibrated import left_out_errors, measured_runs
from trainer.planning.build_config import build_config
from trainer.planning.estimate.calibration import TERMS, Factors, MeasuredRun, calibrate
from trainer.planning.estimate.devices import DEVICES
from trainer.planning.estimate.plan import plan_run

H100 = DEVICES["H100"]
SHAPE = {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "attention_dropout": 0.0}


def measured(truth: Factors, nodes: int, parallel: dict[str, Any] | None = None, **training: Any) -> MeasuredRun:
    """A run as the planner predicts it with the true factors."""
    values = {"train_iters": 1, "seq_length": 4096, "global_batch_size": 64, "bf16": True, **training}
    config = build_config({"model": SHAPE, "parallel": parallel or {}, "training": values, "optimizer": {"lr": 1e-4}})
    plan = plan_run(config, 32000, truth.of(H100), nodes, 8)
    return MeasuredRun(config, 32000, nodes, 8, plan.step.total, plan.worst.total)


def some_runs(truth: Factors) -> list[MeasuredRun]:
    return [
        measured(truth, 1),
        measured(truth, 1, seq_length=16384, global_batch_size=16),
        measured(truth, 1, {"tensor_model_parallel_size": 4}, micro_batch_size=2),
        measured(truth, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
        measured(truth, 2, {"data_parallel_sharding_strategy": "optim", "overlap_grad_reduce": False}),
        measured(truth, 1, recompute_granularity="full", recompute_method="uniform"),
    ]


def test_a_slower_machine_is_learnt_and_predicted() -> None:
    truth = Factors(products=1.2, attention=1.6, memory=1.3, within=1.5, between=2.0)
    found = calibrate(some_runs(truth), H100)
    for new in (
        measured(truth, 1, {"tensor_model_parallel_size": 8}, micro_batch_size=16),
        measured(
            truth, 4, {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}, micro_batch_size=2
        ),
    ):
        before = new.predicted_seconds(H100) / (new.seconds or 0)
        after = new.predicted_seconds(found.of(H100)) / (new.seconds or 0)
        # The penalty keeps factors nearer to 1 than they are.
        assert before < 0.8 and after == pytest.approx(1, abs=0.05)


def test_terms_that_no_run_shows_stay_as_they_were() -> None:
    truth = Factors(products=1.3)
    found = calibrate([measured(truth, 1), measured(truth, 1, micro_batch_size=2)], H100)
    assert found.products > 1.15
    assert [found.between, found.host] == pytest.approx([1, 1], abs=1e-6)


def test_one_broken_run_among_many_spoils_nothing() -> None:
    truth = Factors(products=1.2, attention=1.2)
    good = some_runs(truth)
    broken = replace(good[0], seconds=40 * (good[0].seconds or 0))
    found = calibrate([*good, broken], H100)
    for run in good:
        assert run.predicted_seconds(found.of(H100)) == pytest.approx(run.seconds, rel=0.06)


def test_no_run_changes_nothing() -> None:
    found = calibrate([], H100)
    assert found == Factors() and found.of(H100) == H100
    assert {getattr(found, term) for term in TERMS} == {1.0}


def test_memory_is_learnt_where_it_was_measured() -> None:
    truth = Factors(fragments=0.4)
    runs = [measured(truth, 1), measured(truth, 1, micro_batch_size=2)]
    found = calibrate(runs, H100)
    assert found.fragments == pytest.approx(0.4, abs=0.01)
    new = measured(truth, 1, micro_batch_size=4)
    predicted = plan_run(new.config, 32000, found.of(H100), 1, 8).worst.total
    assert predicted == pytest.approx(new.bytes, rel=0.01)
    assert calibrate([replace(run, bytes=None) for run in runs], H100).fragments is None


@pytest.mark.parametrize("device", ["H100", "A100-80GB", "A100-40GB"])
def test_a_model_that_was_left_out_is_predicted_better(device: str) -> None:
    """MPT of 125M to 70B parameters, published by MosaicML: each model by the runs of the others."""
    errors = left_out_errors(measured_runs()["llm-foundry", device])
    before, after = (sorted(map(abs, part))[len(part) // 2] for part in zip(*errors, strict=True))
    assert after < 0.05 and after < 0.7 * before
