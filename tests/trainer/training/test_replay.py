"""A step that is not finite is computed again: the first rank, module and direction are told."""

import math

import pytest

from tests.trainer.training.pretraining_job import Job
from tests.trainer.training.test_endings import error_of, rows, write_config

FIRST_BAD = 3
"""Step whose numbers are the first that are not finite."""


def spoil(*, times=None, direction="forward"):
    """Make the output of the last layer's MLP on this rank NaN, or its gradient, from step FIRST_BAD on."""
    import torch

    from trainer.model import mlp
    from trainer.training import loop

    forward, forward_backward = mlp.MLP.forward, loop.forward_backward
    state = {"steps": 0, "calls": 0}

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(_context, value):
            return value.clone()

        @staticmethod
        def backward(_context, gradient):
            return gradient * math.nan

    def step(*arguments, **named):
        state["steps"] += 1
        state["calls"] = 0
        return forward_backward(*arguments, **named)

    def spoiled(self, *arguments, **named):
        output = forward(self, *arguments, **named)
        state["calls"] += 1
        is_bad = state["steps"] >= FIRST_BAD and (times is None or state["steps"] < FIRST_BAD + times)
        if not is_bad or state["calls"] != 2:
            return output
        return output * math.nan if direction == "forward" else Poison.apply(output)

    mlp.MLP.forward, loop.forward_backward = spoiled, step


def spoil_backward():
    spoil(direction="backward")


def spoil_once():
    spoil(times=1)


def said(run):
    text = (run / "attempts/1/rank-00000.log").read_text()
    return [line for line in text.splitlines() if line.startswith("iteration ") and "again" in line]


def train(run, ranks, spoils, **parallel):
    write_config(run, training={"train_iters": 8, "max_skipped_steps": 3}, parallel=parallel)
    with Job(run, ranks, spoils) as job:
        return job.ends(range(ranks))


@pytest.mark.parametrize(
    "parallel",
    [{}, {"tensor_model_parallel_size": 2}, {"data_parallel_sharding_strategy": "optim_grads_params"}],
    ids=["dp", "tp", "zero3"],
)
def test_the_rank_and_module_of_the_forward_are_named(tmp_path, parallel):
    run = tmp_path / "run"
    assert 1 in train(run, 2, {1: spoil}, **parallel)
    (line,) = said(run)
    assert line.startswith(
        f"iteration {FIRST_BAD}: computed again, the first that is not finite is the output of layers.1.mlp"
    )
    assert "on rank 1 (" in line and "rank 0" not in line
    assert line in error_of(run)["message"]


def test_the_direction_is_told(tmp_path):
    run = tmp_path / "run"
    assert 1 in train(run, 2, {1: spoil_backward})
    (line,) = said(run)
    assert "is the gradient of the output of layers.1" in line and "on rank 1 (" in line


def test_a_replay_that_differs_names_a_wrong_computation(tmp_path):
    run = tmp_path / "run"
    assert train(run, 2, {1: spoil_once}) == [0, 0]
    (line,) = said(run)
    assert "the same step, computed again, is finite: rank 1 (" in line and "computed wrongly" in line
    assert [row["nan_iterations"] for row in rows(run) if "nan_iterations" in row][-1] == 1


def test_without_the_key_nothing_is_computed_again(tmp_path):
    run = tmp_path / "run"
    spoils = {"lr": 1e30, "lr_warmup_iters": 0, "clip_grad": 0, "optimizer": "sgd"}
    write_config(run, spoils, training={"max_skipped_steps": 2, "replay_skipped_steps": False})
    with Job(run, 1) as job:
        assert job.ends([0]) == [1]
    assert said(run) == []
