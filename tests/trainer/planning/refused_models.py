"""Refused combinations of the keys of experts, and keys of parts that the trainer does not have."""

from __future__ import annotations

from typing import Any

from tests.trainer.planning.refused_bert import REFUSED_BERT
from tests.trainer.planning.refused_hooks import REFUSED_HOOKS
from trainer.config.sections.model import ModelConfig

MOE = {"num_experts": 4}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}

# as REFUSED in tests.trainer.planning.refused_combinations
REFUSED_MODELS: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    (
        {"model": {**MOE, "moe_shared_expert_gate": True, "disable_bias_linear": True}},
        "model.moe_shared_expert_gate",
        "needs a shared expert",
        {"model": {**MOE, "moe_shared_expert_intermediate_size": 8}},
    ),
    (
        {"model": {**MOE, "moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 8}},
        "model.moe_shared_expert_gate",
        "is not supported with biases",
        {"model": {**MOE, "disable_bias_linear": True}},
    ),
    (
        {"model": {**MOE, "moe_layer_freq": [True]}},
        "model.moe_layer_freq",
        "one entry for each of the",
        {"model": {**MOE, "moe_layer_freq": 1}},
    ),
    *(
        (
            {"model": {**MOE, **SINKHORN, key: value}},
            f"model.{key}",
            "has no effect with moe_router_load_balancing_type sinkhorn",
            {"model": {**MOE, **SINKHORN, key: ModelConfig.model_fields[key].default}},
        )
        for key, value in (
            ("moe_router_score_function", "sigmoid"),
            ("moe_router_topk_scaling_factor", 2.5),
            ("moe_router_enable_expert_bias", True),
            ("moe_router_num_groups", 2),
        )
    ),
    (
        {"model": {**MOE, **SINKHORN, "moe_router_topk": 1, "moe_router_pre_softmax": True}},
        "model.moe_router_pre_softmax",
        "whose scores are sigmoids with moe_router_topk 1",
        {"model": {**MOE, **SINKHORN, "moe_router_topk": 1, "moe_router_pre_softmax": False}},
    ),
    (
        {"model": {**MOE, **SINKHORN, "moe_aux_loss_coeff": 0.01}},
        "model.moe_aux_loss_coeff",
        "contradicts moe_router_load_balancing_type sinkhorn or none",
        {"model": {**MOE, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01}},
    ),
    (
        {"model": {**MOE, "moe_router_norm_topk_prob": False}},
        "model.moe_router_norm_topk_prob",
        "set moe_router_pre_softmax instead",
        {"model": {**MOE, "moe_router_norm_topk_prob": False, "moe_router_score_function": "sigmoid"}},
    ),
    (
        {"model": {**MOE, "moe_router_enable_expert_bias": True}},
        "model.moe_router_enable_expert_bias",
        "needs moe_router_score_function sigmoid",
        {"model": {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}},
    ),
    (
        {"model": {**MOE, "moe_router_bias_update_rate": 0.1}},
        "model.moe_router_bias_update_rate",
        "needs moe_router_enable_expert_bias",
        {"model": {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}},
    ),
    (
        {"model": {**MOE, "moe_router_group_topk": 1}},
        "model.moe_router_group_topk",
        "needs moe_router_num_groups",
        {"model": {**MOE, "moe_router_group_topk": 1, "moe_router_num_groups": 2}},
    ),
    (
        {"model": {**MOE, "moe_router_num_groups": 2}},
        "model.moe_router_group_topk",
        "moe_router_num_groups needs it",
        {"model": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 1}},
    ),
    (
        {"model": {**MOE, "moe_router_num_groups": 3, "moe_router_group_topk": 2}},
        "model.moe_router_num_groups",
        "3 does not divide model.num_experts 4",
        {"model": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 2}},
    ),
    (
        {"model": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 3}},
        "model.moe_router_group_topk",
        "is above moe_router_num_groups 2",
        {"model": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 2}},
    ),
    (
        {"model": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 3}},
        "model.moe_router_topk",
        "is above the 2 experts",
        {"model": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_router_topk": 3}},
    ),
    (
        {"model": {**MOE, "moe_router_num_groups": 4, "moe_router_group_topk": 2}},
        "model.moe_router_group_score",
        "top2 needs groups of two experts",
        {"model": {**MOE, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_score": "max"}},
    ),
    (
        {"model": {"mtp_num_layers": 1, "architecture": "bert", "position_embedding_type": "rope"}},
        "model.mtp_num_layers",
        "needs model.architecture decoder",
        {"model": {"mtp_num_layers": 1, "architecture": "decoder", "position_embedding_type": "rope"}},
    ),
    (
        {"model": {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"}},
        "model.mtp_num_layers",
        "learned positions",
        {"model": {"mtp_num_layers": 1, "position_embedding_type": "rope"}},
    ),
    (
        {"model": {"mtp_num_layers": 1, "position_embedding_type": "rope", "add_head_bias": True}},
        "model.mtp_num_layers",
        "add_head_bias",
        {"model": {"mtp_num_layers": 1, "position_embedding_type": "rope", "add_head_bias": False}},
    ),
    (
        {"model": {"mtp_loss_scaling_factor": 0.3}},
        "model.mtp_loss_scaling_factor",
        "needs mtp_num_layers",
        {"model": {"mtp_loss_scaling_factor": 0.3, "mtp_num_layers": 1, "position_embedding_type": "rope"}},
    ),
    (
        {"model": {"embedding_layer_norm": True, "mtp_num_layers": 1, "position_embedding_type": "rope"}},
        "model.embedding_layer_norm",
        "cannot be combined with mtp_num_layers",
        {"model": {"mtp_num_layers": 0}},
    ),
    (
        {"model": {"position_embedding_type": "alibi", "attention_sinks": True}},
        "model.attention_sinks",
        "cannot be combined with position_embedding_type alibi",
        {"model": {"position_embedding_type": "rope"}},
    ),
    (
        {"model": {"position_embedding_type": "alibi", "attn_logit_softcapping": 50.0}},
        "model.attn_logit_softcapping",
        "cannot be combined with position_embedding_type alibi",
        {"model": {"position_embedding_type": "rope"}},
    ),
    *REFUSED_BERT,
    *REFUSED_HOOKS,
    (
        {"model": {"mup_base_hidden_size": 8, "init_method": "xavier_uniform"}},
        "model.init_method",
        "ignores mup_base_hidden_size",
        {"model": {"init_method": "normal"}},
    ),
    (
        {"model": {"mup_base_hidden_size": 8, "embedding_size": 8}},
        "model.embedding_size",
        "is a second width",
        {"model": {"embedding_size": None}},
    ),
    (
        {"model": {"activation_clamp": 7.0}},
        "model.activation_clamp",
        "set swiglu or gated_linear_unit",
        {"model": {"activation_clamp": 7.0, "gated_linear_unit": True}},
    ),
    (
        {"model": {"activation_alpha": 1.7, "gated_linear_unit": True}},
        "model.activation_alpha",
        "is a form of SwiGLU",
        {"model": {"activation_alpha": 1.7, "swiglu": True}},
    ),
]
