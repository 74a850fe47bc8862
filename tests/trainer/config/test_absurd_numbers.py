"""Absurdly large numbers in a config: refused immediately, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.checks import check_world_size
from trainer.planning.layouts import divisors_of


def config_of(**sections: dict[str, Any]) -> TrainConfig:
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0},
        "training": {"train_iters": 10, "seq_length": 64},
        "optimizer": {"lr": 1e-3},
    }
    return build_config({**values, **{name: {**values.get(name, {}), **keys} for name, keys in sections.items()}})


BILLION = 10**9 + 7  # a prime


@pytest.mark.parametrize(
    ("asked", "key", "says"),
    [
        (
            {"model": {"num_layers": BILLION}, "parallel": {"pipeline_model_parallel_size": 2}},
            "model.num_layers",
            "equal to 10000",
        ),
        ({"model": {"hidden_size": 30_000_001}}, "model.num_attention_heads", "use one of 1, 30000001"),
        ({"model": {"hidden_size": 4 * BILLION, "num_attention_heads": 3}}, "model.num_attention_heads", "1, 2, 4"),
        ({"model": {"hidden_size": 10**30}}, "model.hidden_size", "the largest accepted value is 1,000,000,000,000"),
        (
            {
                "model": {"hidden_size": 2 * BILLION, "num_attention_heads": BILLION},
                "parallel": {"tensor_model_parallel_size": 4},
            },
            "parallel.tensor_model_parallel_size",
            f"use one of 1, {BILLION}",
        ),
        (
            {
                "model": {"hidden_size": 36 * BILLION, "num_attention_heads": 36 * BILLION, "num_query_groups": 4},
                "parallel": {"tensor_model_parallel_size": 6},
            },
            "parallel.tensor_model_parallel_size",
            "is neither a divisor nor a multiple of model.num_query_groups 4; use one of 1, 2, 4",
        ),
        (
            {"model": {"num_experts": BILLION}, "parallel": {"expert_model_parallel_size": 2}},
            "parallel.expert_model_parallel_size",
            f"use one of 1, {BILLION}",
        ),
        ({"model": {"vocab_size": BILLION**2}}, "model.vocab_size", "less than 2147483648"),
        ({"parallel": {"distributed_timeout_minutes": 1e300}}, "parallel.distributed_timeout_minutes", "525600"),
        (
            {"parallel": {"pipeline_model_parallel_size": BILLION}},
            "parallel.pipeline_model_parallel_size",
            "use at most 6",
        ),
        ({"training": {"seed": 2**64}}, "training.seed", "equal to 9223372036854775807"),
    ],
)
def test_absurd_numbers_are_refused_at_once(asked: dict[str, dict[str, Any]], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**asked)
    assert (caught.value.key, says in caught.value.problem) == (key, True), caught.value


def test_more_micro_batches_than_a_schedule_holds() -> None:
    too_many = config_of(training={"global_batch_size": 10**9, "micro_batch_size": 2})
    with pytest.raises(ConfigError) as caught:
        check_world_size(too_many, 1)
    error = caught.value
    assert error.key == "training.global_batch_size"
    assert "makes 500,000,000 micro-batches" in error.problem
    assert "use at most 200,000" in error.problem
    check_world_size(config_of(training={"global_batch_size": 200_000, "micro_batch_size": 2}), 1)


def test_divisors() -> None:
    for number in (*range(1, 200), 3600, 9973):
        assert divisors_of(number) == [d for d in range(1, number + 1) if number % d == 0]
