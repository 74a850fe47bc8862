"""Refused combinations of config keys, the key in the error, and an accepted change."""

from __future__ import annotations

from typing import Any

from tests.trainer.planning.refused_batches import REFUSED_BATCHES
from tests.trainer.planning.refused_encoder_decoders import REFUSED_ENCODER_DECODERS
from tests.trainer.planning.refused_models import MOE, REFUSED_MODELS
from tests.trainer.planning.refused_optimizers import REFUSED_OPTIMIZERS
from tests.trainer.planning.refused_profiles import REFUSED_PROFILES
from tests.trainer.planning.refused_starts import REFUSED_STARTS

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VIRTUAL, PER_STAGE = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
SHARDING = "data_parallel_sharding_strategy"
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2} | {
    "v_head_dim": 4,
    "position_embedding_type": "rope",
}

# config, key in the error, part of the message, change that makes the config valid
REFUSED: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    *REFUSED_BATCHES,
    *REFUSED_OPTIMIZERS,
    *REFUSED_PROFILES,
    (
        {"model": {"attention_backend": "flash", "attention_dropout": 0.1}},
        "model.attention_backend",
        "does not support attention dropout; set model.attention_dropout to 0, or use fused or auto",
        {"model": {"attention_backend": "fused", "attention_dropout": 0.1}},
    ),
    (
        {"model": {"attention_backend": "fused", "attn_logit_softcapping": 50.0}},
        "model.attention_backend",
        "torch's kernels do not have; use flash, unfused or auto",
        {"model": {"attention_backend": "auto", "attn_logit_softcapping": 50.0}},
    ),
    (
        {"parallel": {CP: 2}, "model": {"architecture": "bert"}},
        f"parallel.{CP}",
        "divides causal self-attention only",
        {"parallel": {CP: 2}, "model": {"architecture": "decoder"}},
    ),
    (
        {"model": {"architecture": "t5", "window_size": 8}},
        "model.window_size",
        "needs causal attention",
        {"model": {"architecture": "decoder", "window_size": 8}},
    ),
    (
        {"model": {"window_layers": [True, False, True, False]}},
        "model.window_layers",
        "needs window_size",
        {"model": {"window_layers": [True, False, True, False], "window_size": 8}},
    ),
    (
        {"model": {"window_layers": [True], "window_size": 8}},
        "model.window_layers",
        "one entry for each of model.num_layers",
        {"model": {"window_layers": "all", "window_size": 8}},
    ),
    (
        {"model": {"no_rope_freq": 2}},
        "model.no_rope_freq",
        "set that to rope",
        {"model": {"no_rope_freq": 2, "position_embedding_type": "rope"}},
    ),
    (
        {"model": {"no_rope_freq": [True, False], "position_embedding_type": "rope"}},
        "model.no_rope_freq",
        "one entry for each of model.num_layers",
        {"model": {"no_rope_freq": [True, False, False, True], "position_embedding_type": "rope"}},
    ),
    (
        {"model": {**LATENT, "no_rope_freq": 2}},
        "model.no_rope_freq",
        "is not supported with multi_latent_attention",
        {"model": {**LATENT, "no_rope_freq": None}},
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
    *(
        (
            {"parallel": {SHARDING: strategy}, "training": {"check_weight_hash_across_dp_replicas_interval": 5}},
            "training.check_weight_hash_across_dp_replicas_interval",
            "has no copies to compare with parallel.data_parallel_sharding_strategy optim_grads",
            {"parallel": {SHARDING: "optim"}},
        )
        for strategy in ("optim_grads", "optim_grads_params")
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
    (
        {"parallel": {PP: 2, "pipeline_schedule": "interleaved", PER_STAGE: 2}},
        f"parallel.{PER_STAGE}",
        "gives one virtual stage per rank",
        {"parallel": {PP: 2, "pipeline_schedule": "interleaved", PER_STAGE: 1}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_schedule": "interleaved", "pipeline_model_parallel_layout": "Ett|ttL"}},
        "parallel.pipeline_model_parallel_layout",
        "use more stages",
        {
            "parallel": {
                PP: 2,
                "pipeline_schedule": "interleaved",
                "pipeline_model_parallel_layout": "Et|t|t|tL",
            }
        },
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
    *(
        (
            {"parallel": {PP: 2, "pipeline_schedule": "zb-v", key: 1}},
            f"parallel.{key}",
            says,
            {"parallel": {key: None, "pipeline_model_parallel_layout": "Et|t|t|tL"}},
        )
        for key, says in (
            ("decoder_first_pipeline_num_layers", "whose first rank holds both ends of the model"),
            ("decoder_last_pipeline_num_layers", "whose last rank holds the middle of the model"),
        )
    ),
    (
        {"parallel": {PP: 2, PER_STAGE: 1, VIRTUAL: 2}},
        f"parallel.{PER_STAGE}",
        f"cannot be combined with parallel.{VIRTUAL}; set only one",
        {"parallel": {PER_STAGE: None}},
    ),
    (
        {"parallel": {PP: 2, PER_STAGE: 1, "decoder_last_pipeline_num_layers": 2}},
        f"parallel.{PER_STAGE}",
        "cannot be combined with parallel.decoder_last_pipeline_num_layers",
        {"parallel": {PER_STAGE: None}},
    ),
    (
        {"parallel": {PP: 2, "pipeline_model_parallel_layout": "Ett|ttL", "decoder_first_pipeline_num_layers": 2}},
        "parallel.pipeline_model_parallel_layout",
        "cannot be combined with parallel.decoder_first_pipeline_num_layers",
        {"parallel": {"decoder_first_pipeline_num_layers": None}},
    ),
    ({"parallel": {EP: 2}}, f"parallel.{EP}", "set model.num_experts", {"model": MOE}),
    ({"parallel": {EP: 3}, "model": MOE}, f"parallel.{EP}", "use one of 1, 2, 4", {"parallel": {EP: 4}}),
    ({"parallel": {TP: 2, ETP: 4}, "model": MOE}, f"parallel.{ETP}", "must divide", {"parallel": {TP: 4, ETP: 2}}),
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
        {"model": {**MOE, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}},
        "model.moe_router_pre_softmax",
        "needs moe_router_score_function softmax",
        {"model": {**MOE, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False}},
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
        ({"model": {key: value}}, f"model.{key}", "set model.num_experts, or leave", {"model": {"num_experts": 4}})
        for key, value in (
            ("moe_layer_freq", 2),
            ("moe_ffn_hidden_size", 32),
            ("moe_router_topk", 3),
            ("moe_router_score_function", "sigmoid"),
            ("moe_router_pre_softmax", True),
            ("moe_router_topk_scaling_factor", 2.5),
            ("moe_router_load_balancing_type", "none"),
            ("moe_aux_loss_coeff", 0.01),
            ("moe_z_loss_coeff", 0.001),
            ("moe_expert_capacity_factor", 1.5),
            ("moe_shared_expert_intermediate_size", 32),
            ("moe_router_bias", True),
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
        "needs recompute_granularity full",
        {"training": {"recompute_granularity": "full"}},
    ),
    (
        {"training": {"recompute_num_layers": 2}},
        "training.recompute_num_layers",
        "needs recompute_granularity full",
        {"training": {"recompute_granularity": "full", "recompute_method": "block"}},
    ),
    (
        {"training": {"recompute_modules": ["mlp"]}},
        "training.recompute_modules",
        "needs recompute_granularity selective",
        {"training": {"recompute_granularity": "selective"}},
    ),
    (
        {"training": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
        "training.recompute_modules",
        "moe and moe_act need mixture-of-experts layers",
        {"model": MOE},
    ),
    (
        {"model": MOE, "training": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}},
        "training.recompute_modules",
        "all layers of this model have experts; use moe or moe_act",
        {"training": {"recompute_modules": ["core_attn", "moe"]}},
    ),
    (
        {
            "model": {**MOE, "num_layers": 1},
            "training": {"recompute_granularity": "selective", "recompute_modules": "mlp"},
        },
        "training.recompute_modules",
        "mlp and mlp_act need a dense feed-forward layer",
        {"model": {**MOE, "num_layers": 2, "moe_layer_freq": 2}},
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
        "use one of core_attn, mlp, mlp_act, layernorm",
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
        "is neither a divisor nor a multiple of model.num_query_groups 6; use one of 1, 2, 3, 6, 12",
        # More ranks than key and value heads: ranks share heads.
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
        "62 is not divisible by 4, as context_parallel_size 2 with cp_comm_type p2p requires; use 60 or 64",
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
        # With fewer key and value heads than ranks the heads are repeated.
        {"parallel": {TP: 2}, "model": {"num_query_groups": 2}},
    ),
    (
        {"optimizer": {"optimizer_offload_fraction": 0.5}},
        "optimizer.optimizer_offload_fraction",
        "is only used with optimizer_cpu_offload",
        {"optimizer": {"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": True}},
    ),
    (
        {"model": {"parallel_residual": True, "norm_placement": "post"}},
        "model.norm_placement",
        "must be pre with parallel_residual",
        {"model": {"parallel_residual": False}},
    ),
    (
        {"model": {"shared_parallel_norm": True}},
        "model.shared_parallel_norm",
        "needs parallel_residual",
        {"model": {"shared_parallel_norm": True, "parallel_residual": True}},
    ),
    (
        {"model": {"position_embedding_offset": 2, "position_embedding_type": "rope"}},
        "model.position_embedding_offset",
        "needs position_embedding_type learned_absolute",
        {"model": {"position_embedding_type": "learned_absolute"}},
    ),
    (
        {"model": {"activation_func": "relu", "openai_gelu": True}},
        "model.activation_func",
        "which name the activation too",
        {"model": {"openai_gelu": False}},
    ),
    (
        {"model": {"squared_relu": True, "swiglu": True}},
        "model.squared_relu",
        "which name another activation",
        {"model": {"swiglu": False, "gated_linear_unit": True}},
    ),
    *REFUSED_MODELS,
    *REFUSED_STARTS,
    *REFUSED_ENCODER_DECODERS,
]
