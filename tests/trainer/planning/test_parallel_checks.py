"""Every refused combination with its message, and a similar combination that is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.trainer.planning.refused_combinations import CP, EP, ETP, MOE, PER_STAGE, PP, REFUSED, SHARDING, TP, VIRTUAL
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.architecture_checks import OF_BERT
from trainer.planning.build_config import build_config
from trainer.planning.checks import check_world_size
from trainer.planning.incompatible import IMPOSSIBLE
from trainer.planning.optimizer_checks import OF_STATES
from trainer.planning.parallel_checks import EXCLUSIVE_KEYS


def build(**sections: dict[str, Any]) -> TrainConfig:
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0},
        "training": {"train_iters": 10, "seq_length": 64},
        "optimizer": {"lr": 1e-3},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return build_config(values)


@pytest.mark.parametrize(("asked", "key", "says", "change"), REFUSED)
def test_refused_combinations_are_accepted_after_the_suggested_change(
    asked: dict[str, dict[str, Any]], key: str, says: str, change: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**asked)
    assert caught.value.key == key
    assert says in caught.value.problem
    assert "\n" not in caught.value.problem
    build(
        **{section: {**asked.get(section, {}), **change.get(section, {})} for section in asked.keys() | change.keys()}
    )


# For each key that places layers, a value that is valid on its own.
PLACES: dict[str, Any] = {
    "pipeline_model_parallel_layout": "Ett|ttL",
    "decoder_first_pipeline_num_layers": 2,
    "decoder_last_pipeline_num_layers": 2,
    VIRTUAL: 2,
    PER_STAGE: 1,
}


@pytest.mark.parametrize(
    ("key", "other"), [(key, other) for key, *others in EXCLUSIVE_KEYS for other in others], ids=str
)
def test_keys_that_place_the_layers_exclude_each_other(key: str, other: str) -> None:
    for alone in (key, other):
        build(parallel={PP: 2, alone: PLACES[alone]})
    with pytest.raises(ConfigError) as caught:
        build(parallel={PP: 2, key: PLACES[key], other: PLACES[other]})
    assert caught.value.key == f"parallel.{key}"
    assert f"cannot be combined with parallel.{other}; set only one of the two" in caught.value.problem


def test_every_impossible_combination_has_its_case() -> None:
    said = [(key, says) for _, key, says, _ in REFUSED]
    for key, _, sentence in (*IMPOSSIBLE, *OF_STATES, *OF_BERT):
        assert any(key == of and says in sentence for of, says in said), f"{key}: {sentence}"


@pytest.mark.parametrize(
    "parallel",
    [
        {PP: 2, "pipeline_schedule": "zb-h1", "use_distributed_optimizer": True},
        {PP: 2, VIRTUAL: 2},
        {PP: 3},
        {TP: 4, PP: 2, CP: 2, "sequence_parallel": True, SHARDING: "optim_grads_params"},
    ],
)
def test_accepted(parallel: dict[str, Any]) -> None:
    build(parallel=parallel)


def refusal(one: TrainConfig, world_size: int) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_world_size(one, world_size)
    assert "\n" not in caught.value.problem
    return caught.value


def test_world_size_with_context_parallelism() -> None:
    one = build(parallel={TP: 2, CP: 2, PP: 3})
    check_world_size(one, 24)
    error = refusal(one, 16)
    assert "TP 2 x PP 3 x CP 2 = 12 does not divide the world size 16" in error.problem
    assert "TP 2 x PP 4 x CP 2 x DP 1" in error.problem
    assert one.data_parallel_size(24) == 2


def test_nearest_layouts_need_not_divide_the_layers() -> None:
    assert "TP 1 x PP 3 x DP 1" in refusal(build(parallel={TP: 1, PP: 2}), 3).problem


def test_nearest_layouts_keep_an_explicitly_divided_pipeline() -> None:
    one = build(parallel={TP: 4, PP: 2, "decoder_first_pipeline_num_layers": 1})
    problem = refusal(one, 12).problem
    assert "TP 2 x PP 2 x DP 3" in problem
    assert "PP 1" not in problem
    assert "PP 3" not in problem


@pytest.mark.parametrize(("cp", "world_size", "valid"), [(1, 6, "1, 2"), (2, 6, "1, 2"), (1, 4, "")])
def test_experts_divide_over_the_data_ranks(cp: int, world_size: int, valid: str) -> None:
    one = build(parallel={EP: 4, CP: cp}, model=MOE)
    if not valid:
        check_world_size(one, world_size)
        return
    error = refusal(one, world_size)
    assert error.key == f"parallel.{EP}"
    assert f"4 does not divide DP {world_size // cp} x CP {cp} = {world_size}" in error.problem
    assert f"use one of {valid}" in error.problem


def test_whole_experts_divide_over_tp_too() -> None:
    one = build(parallel={TP: 4, EP: 4, ETP: 1}, model=MOE)
    for world_size in (4, 8, 12):
        check_world_size(one, world_size)
    error = refusal(build(parallel={TP: 2, EP: 4, ETP: 1}, model=MOE), 6)
    assert "4 does not divide 2 of TP x DP 3 x CP 1 = 6" in error.problem and "use one of 1, 2" in error.problem
    assert refusal(build(parallel={TP: 4, EP: 4}, model=MOE), 4).key == f"parallel.{EP}"
    assert refusal(build(parallel={TP: 4, EP: 4, ETP: 2}, model=MOE), 4).key == f"parallel.{EP}"
    check_world_size(build(parallel={TP: 4, EP: 4, ETP: 2}, model=MOE), 8)
    # Only the ranks that divide an expert must divide its width.
    narrow = {**MOE, "moe_ffn_hidden_size": 34}
    check_world_size(build(parallel={TP: 4, ETP: 2}, model=narrow), 4)
    with pytest.raises(ConfigError, match="4 does not divide model.moe_ffn_hidden_size 34") as refused:
        build(parallel={TP: 4}, model=narrow)
    assert refused.value.key == f"parallel.{TP}"
    with pytest.raises(ConfigError, match="2 does not divide model.moe_ffn_hidden_size 33") as refused:
        build(parallel={TP: 4, ETP: 2}, model={**narrow, "moe_ffn_hidden_size": 33})
    assert refused.value.key == f"parallel.{ETP}"
    # Without experts the key means nothing.
    check_world_size(build(parallel={TP: 2, ETP: 4}), 4)


def test_nearest_layouts_also_fit_the_experts() -> None:
    problem = refusal(build(parallel={TP: 4, PP: 3, EP: 4}, model=MOE), 16).problem
    assert problem.endswith("TP 2 x PP 2 x DP 4; TP 4 x PP 1 x DP 4; TP 1 x PP 4 x DP 4")


@pytest.mark.parametrize(
    ("ramp", "world_size", "says"),
    [
        ([4, 4, 100], 2, ""),
        ([6, 6, 100], 4, "the batch of 6 samples on the way to 24 is not divisible by micro_batch_size 1 x DP 4 = 4"),
        ([6, 6, 100], 4, "; use [8, 4, 100], or fewer replicas"),
        ([4, 2, 100], 4, "the batch of 6 samples on the way to 24"),
        # The ramp is so short that it skips the sizes that do not fit.
        ([4, 2, 1], 4, ""),
        ([8, 8, 100], 24, "leave the key out, or use fewer replicas"),
    ],
)
def test_every_size_of_a_growing_batch_divides_over_the_replicas(ramp: list[int], world_size: int, says: str) -> None:
    one = build(training={"global_batch_size": 24, "rampup_batch_size": ramp})
    if not says:
        check_world_size(one, world_size)
        return
    error = refusal(one, world_size)
    assert error.key == "training.rampup_batch_size"
    assert says in error.problem
    if "; use [" in error.problem:
        nearest = json.loads(error.problem.partition("; use ")[2].partition(", or")[0])
        check_world_size(build(training={"global_batch_size": 24, "rampup_batch_size": nearest}), world_size)


@pytest.mark.parametrize(
    ("steps", "world_size", "says"),
    [
        ("0:8 1K:4 2K:16", 4, ""),
        ("0:8 1K:4 2K:16", 8, "4 is not divisible by micro_batch_size 1 x DP 8 = 8; use 8"),
        # The first batch passes the second step.
        ("0:16 64:4 128:8", 8, ""),
        ("0:800_008 1K:8", 8, "800008 makes 100,001 micro-batches per replica and iteration; use at most"),
    ],
)
def test_every_step_of_the_batch_divides_over_the_replicas(steps: str, world_size: int, says: str) -> None:
    one = build(training={"step_batch_size_schedule": steps})
    if not says:
        check_world_size(one, world_size)
        return
    error = refusal(one, world_size)
    assert error.key == "training.step_batch_size_schedule" and says in error.problem


def test_no_layout_at_all() -> None:
    one = build(parallel={PP: 2, "decoder_first_pipeline_num_layers": 1})
    assert "that fit: none; use another number of ranks" in refusal(one, 5).problem


def test_profiled_ranks_are_in_the_job() -> None:
    one = build(logging={"profile_steps": [2, 4], "profile_ranks": [0, 2, 5]}, training={"global_batch_size": 6})
    with pytest.raises(ConfigError, match=r"^logging.profile_ranks: \[2, 5\] is not in the job, which has 2 ranks; "):
        check_world_size(one, 2)
    check_world_size(one, 6)
    # Without steps no rank is profiled.
    check_world_size(build(logging={"profile_ranks": [5]}), 1)
