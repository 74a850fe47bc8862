"""Every combination that cannot be, with its sentence; and its nearest neighbours, which can."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import ConfigError, TrainConfig, build_config
from trainer.parallel_checks import IMPOSSIBLE

MOE = {"num_experts": 4}


def build(**sections: dict[str, Any]) -> TrainConfig:
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0},
        "training": {"train_iters": 10, "seq_length": 64},
        "optimizer": {"lr": 1e-3},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return build_config(values)


TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VIRTUAL, PER_STAGE = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
SHARDING = "data_parallel_sharding_strategy"

# what is asked for, the key that is blamed, part of the sentence, the change after which it is accepted
REFUSED: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    (
        {"parallel": {CP: 2}, "model": {"attention_dropout": 0.1}},
        "model.attention_dropout",
        "cp_comm_type to a2a",
        {"parallel": {CP: 2, "cp_comm_type": "a2a"}},
    ),
    (
        {"model": {"attention_backend": "fused", "attention_dropout": 0.1}},
        "model.attention_backend",
        "set model.attention_dropout to 0, or use unfused or auto",
        {"model": {"attention_backend": "fused", "attention_dropout": 0.0}},
    ),
    (
        {"model": {"attention_backend": "flash", "attention_dropout": 0.1}},
        "model.attention_backend",
        "have no dropout",
        {"model": {"attention_backend": "auto", "attention_dropout": 0.1}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_schedule": "zb-h1", SHARDING: "optim_grads"}},
        f"parallel.{SHARDING}",
        "use optim, or another parallel.pipeline_schedule",
        {"parallel": {PP: 2, "pipeline_schedule": "zb-h1", SHARDING: "optim"}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_schedule": "zb-v", SHARDING: "optim_grads_params"}},
        f"parallel.{SHARDING}",
        "zero-bubble",
        {"parallel": {PP: 2, "pipeline_schedule": "1f1b", SHARDING: "optim_grads_params"}},
    ),
    (
        {"parallel": {"use_distributed_optimizer": True, SHARDING: "no_shard"}},
        f"parallel.{SHARDING}",
        "contradicts parallel.use_distributed_optimizer",
        {"parallel": {"use_distributed_optimizer": True, SHARDING: "optim_grads"}},
    ),
    (
        {"parallel": {VIRTUAL: 2, SHARDING: "optim_grads"}},
        f"parallel.{SHARDING}",
        "leave out the virtual stages",
        {"parallel": {PP: 2}},
    ),
    (
        {"parallel": {SHARDING: "optim_grads"}, "optimizer": {"optimizer_cpu_offload": True}},
        "optimizer.optimizer_cpu_offload",
        "sharding_strategy optim",
        {"parallel": {SHARDING: "optim"}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_schedule": "interleaved"}},
        "parallel.pipeline_schedule",
        "num_virtual_stages_per_pipeline_rank to 2",
        {"parallel": {PP: 2, "pipeline_schedule": "interleaved", VIRTUAL: 2}},
    ),
    *(
        (
            {"parallel": {PP: 2, "pipeline_schedule": schedule, VIRTUAL: 2}},
            "parallel.pipeline_schedule",
            "use interleaved",
            {"parallel": {PP: 2, "pipeline_schedule": schedule, VIRTUAL: 1}},
        )
        for schedule in ("gpipe", "1f1b", "zb-h1")
    ),
    (
        {"parallel": {PP: 2, "pipeline_schedule": "zb-v", VIRTUAL: 3}},
        f"parallel.{VIRTUAL}",
        "always 2",
        {"parallel": {PP: 2, "pipeline_schedule": "zb-v", VIRTUAL: 2}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_schedule": "zb-v", PER_STAGE: 1}},
        f"parallel.{PER_STAGE}",
        "zb-v",
        {"parallel": {"pipeline_schedule": None}},
    ),
    (
        {"parallel": {PP: 2, PER_STAGE: 1, VIRTUAL: 2}},
        f"parallel.{PER_STAGE}",
        f"and parallel.{VIRTUAL} exclude each other",
        {"parallel": {PER_STAGE: None}},
    ),
    (
        {"parallel": {PP: 2, PER_STAGE: 1, "decoder_last_pipeline_num_layers": 2}},
        f"parallel.{PER_STAGE}",
        "decoder_last_pipeline_num_layers exclude",
        {"parallel": {PER_STAGE: None}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_model_parallel_layout": "Ett|ttL", "decoder_first_pipeline_num_layers": 2}},
        "parallel.pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers exclude",
        {"parallel": {"decoder_first_pipeline_num_layers": None}},
    ),
    ({"parallel": {EP: 2}}, f"parallel.{EP}", "set model.num_experts", {"model": MOE}),
    ({"parallel": {EP: 3}, "model": MOE}, f"parallel.{EP}", "use one of 1, 2, 4", {"parallel": {EP: 4}}),
    ({"parallel": {TP: 2, ETP: 1}, "model": MOE}, f"parallel.{ETP}", "leave it out", {"parallel": {TP: 2, ETP: 2}}),
    (
        {"model": {**MOE, "moe_router_topk": 5}},
        "model.moe_router_topk",
        "above model.num_experts",
        {"model": {**MOE, "moe_router_topk": 4}},
    ),
    (
        {"model": {**MOE, "moe_router_topk": 1}},
        "model.moe_router_pre_softmax",
        "never learn",
        {"model": {**MOE, "moe_router_topk": 1, "moe_router_pre_softmax": True}},
    ),
    (
        {"model": {**MOE, "moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"}},
        "model.moe_aux_loss_coeff",
        "use aux_loss",
        {"model": {**MOE, "moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}},
    ),
    (
        {"model": {**MOE, "moe_token_drop_policy": "position"}},
        "model.moe_token_drop_policy",
        "moe_expert_capacity_factor",
        {"model": {**MOE, "moe_expert_capacity_factor": 1.0}},
    ),
    *(
        ({"model": {key: value}}, f"model.{key}", "set model.num_experts too", {"model": {"num_experts": 4}})
        for key, value in (
            ("moe_layer_freq", 2),
            ("moe_ffn_hidden_size", 32),
            ("moe_router_topk", 3),
            ("moe_router_score_function", "sigmoid"),
            ("moe_router_pre_softmax", True),
            ("moe_router_topk_scaling_factor", 2.5),
            ("moe_aux_loss_coeff", 0.01),
            ("moe_z_loss_coeff", 0.001),
            ("moe_expert_capacity_factor", 1.5),
            ("moe_shared_expert_intermediate_size", 32),
        )
    ),
    (
        {"training": {"recompute_granularity": "full"}},
        "training.recompute_method",
        "use uniform or block",
        {"training": {"recompute_method": "uniform"}},
    ),
    (
        {"training": {"recompute_granularity": "selective", "recompute_method": "uniform"}},
        "training.recompute_method",
        "goes with recompute_granularity full",
        {"training": {"recompute_granularity": "full"}},
    ),
    (
        {"training": {"recompute_num_layers": 2}},
        "training.recompute_num_layers",
        "goes with recompute_granularity full",
        {"training": {"recompute_granularity": "full", "recompute_method": "block"}},
    ),
    (
        {"training": {"recompute_modules": ["mlp"]}},
        "training.recompute_modules",
        "goes with recompute_granularity selective",
        {"training": {"recompute_granularity": "selective"}},
    ),
    (
        {"training": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
        "training.recompute_modules",
        "parts of mixture-of-experts layers",
        {"model": MOE},
    ),
    (
        {"training": {"recompute_granularity": "selective", "recompute_modules": ["core_attention"]}},
        "training.recompute_modules",
        "did you mean core_attn?",
        {"training": {"recompute_modules": ["core_attn", "layernorm"]}},
    ),
    (
        {"training": {"recompute_granularity": "selective", "recompute_modules": ["zzz"]}},
        "training.recompute_modules",
        "there are core_attn, mlp, layernorm",
        {"training": {"recompute_modules": "mlp"}},
    ),
    ({"parallel": {TP: 3}}, f"parallel.{TP}", "use one of 1, 2, 4", {"parallel": {TP: 4}}),
    (
        {"parallel": {TP: 4}, "model": {"ffn_hidden_size": 70}},
        f"parallel.{TP}",
        "model.ffn_hidden_size 70",
        {"parallel": {TP: 2}},
    ),
    (
        {"parallel": {TP: 4}, "model": {**MOE, "moe_ffn_hidden_size": 30}},
        f"parallel.{TP}",
        "model.moe_ffn_hidden_size 30",
        {"parallel": {TP: 2}},
    ),
    (
        {"parallel": {TP: 4}, "model": {**MOE, "moe_shared_expert_intermediate_size": 30}},
        f"parallel.{TP}",
        "model.moe_shared_expert_intermediate_size 30",
        {"parallel": {TP: 2}},
    ),
    (
        {"parallel": {TP: 4}, "model": {"num_attention_heads": 12, "hidden_size": 96, "num_query_groups": 6}},
        f"parallel.{TP}",
        "neither divides model.num_query_groups 6 nor is a multiple of it; use one of 1, 2, 3, 6, 12",
        # More ranks than key and value heads: they are shared.
        {"parallel": {TP: 12}},
    ),
    (
        {"parallel": {TP: 4, "sequence_parallel": True}, "training": {"seq_length": 62}},
        "training.seq_length",
        "use 60 or 64 or switch parallel.sequence_parallel off",
        {"parallel": {"sequence_parallel": False}},
    ),
    (
        {"parallel": {CP: 2}, "training": {"seq_length": 62}},
        "training.seq_length",
        "62 is not divisible by 4, as context_parallel_size 2 with cp_comm_type p2p needs; use 60 or 64",
        {"parallel": {"cp_comm_type": "a2a"}},
    ),
    (
        {"parallel": {CP: 4, "cp_comm_type": "a2a"}, "training": {"seq_length": 62}},
        "training.seq_length",
        "62 is not divisible by 4",
        {"training": {"seq_length": 60}},
    ),
    (
        {"parallel": {CP: 2, TP: 4, "sequence_parallel": True}, "training": {"seq_length": 60}},
        "training.seq_length",
        "60 is not divisible by 8, as context_parallel_size 2 with cp_comm_type p2p and sequence_parallel over 4 ranks",
        {"training": {"seq_length": 56}},
    ),
    (
        {"parallel": {CP: 2, TP: 4, "cp_comm_type": "a2a"}},
        f"parallel.{CP}",
        "2 does not divide the 1 attention heads of each tensor-parallel rank",
        # Fewer key and value heads than ranks are repeated.
        {"parallel": {TP: 2}, "model": {"num_query_groups": 2}},
    ),
    (
        {"optimizer": {"optimizer_offload_fraction": 0.5}},
        "optimizer.optimizer_offload_fraction",
        "says how much optimizer_cpu_offload moves to the CPU",
        {"optimizer": {"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": True}},
    ),
]


@pytest.mark.parametrize(("asked", "key", "says", "change"), REFUSED)
def test_refused_with_a_sentence_and_accepted_after_what_it_says(
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


def test_every_impossible_combination_has_its_case() -> None:
    said = [(key, says) for _, key, says, _ in REFUSED]
    for key, _, sentence in IMPOSSIBLE:
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
        one.check_world_size(world_size)
    assert "\n" not in caught.value.problem
    return caught.value


def test_world_size_with_context_parallelism() -> None:
    one = build(parallel={TP: 2, CP: 2, PP: 3})
    one.check_world_size(24)
    error = refusal(one, 16)
    assert "TP 2 x PP 3 x CP 2 = 12 does not divide the world size 16" in error.problem
    assert "TP 2 x PP 4 x CP 2 x DP 1" in error.problem
    assert one.data_parallel_size(24) == 2


def test_nearest_layouts_need_not_divide_the_layers() -> None:
    assert "TP 1 x PP 3 x DP 1" in refusal(build(parallel={TP: 1, PP: 2}), 3).problem


def test_nearest_layouts_keep_a_pipeline_that_was_cut_by_hand() -> None:
    one = build(parallel={TP: 4, PP: 2, "decoder_first_pipeline_num_layers": 1})
    problem = refusal(one, 12).problem
    assert "TP 2 x PP 2 x DP 3" in problem
    assert "PP 1" not in problem
    assert "PP 3" not in problem


@pytest.mark.parametrize(("cp", "world_size", "valid"), [(1, 6, "1, 2"), (2, 6, "1, 2"), (1, 4, "")])
def test_experts_divide_over_the_data_ranks(cp: int, world_size: int, valid: str) -> None:
    one = build(parallel={EP: 4, CP: cp}, model=MOE)
    if not valid:
        one.check_world_size(world_size)
        return
    error = refusal(one, world_size)
    assert error.key == f"parallel.{EP}"
    assert f"4 does not divide DP {world_size // cp} x CP {cp} = {world_size}" in error.problem
    assert f"use one of {valid}" in error.problem


def test_nearest_layouts_leave_the_experts_their_ranks() -> None:
    problem = refusal(build(parallel={TP: 4, PP: 3, EP: 4}, model=MOE), 16).problem
    assert problem.endswith("TP 2 x PP 2 x DP 4; TP 4 x PP 1 x DP 4; TP 1 x PP 4 x DP 4")


def test_no_layout_at_all() -> None:
    one = build(parallel={PP: 2, "decoder_first_pipeline_num_layers": 1})
    assert "that fit: none; ask for another number of ranks" in refusal(one, 5).problem
