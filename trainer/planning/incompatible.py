"""Incompatible settings of a training config, each with its error message. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.planning.pipeline import pipeline_schedule, virtual_stages_per_rank
from trainer.planning.schedule.placement import default_chunks

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_DENSE_MODULES, _EXPERT_MODULES = ("mlp", "mlp_act"), ("moe", "moe_act")


def _splits_backward(config: TrainConfig) -> bool:
    return pipeline_schedule(config) in ("zb-h1", "zb-v")


def _is_short_of_chunks(config: TrainConfig) -> bool:
    schedule = config.parallel.pipeline_schedule
    return schedule is not None and virtual_stages_per_rank(config) < default_chunks(schedule)


def _has_chunks_to_spare(config: TrainConfig) -> bool:
    schedule = config.parallel.pipeline_schedule
    return schedule is not None and default_chunks(schedule) == 1 < virtual_stages_per_rank(config)


def is_changed(section: str, key: str, config: TrainConfig) -> bool:
    """True if a key has another value than its default."""
    values = getattr(config, section)
    return bool(getattr(values, key) != type(values).model_fields[key].default)


Rows = tuple[tuple[str, Callable[["TrainConfig"], bool], str], ...]
"""Of combinations: the key to name, a test whether the config has it, and the message."""

IMPOSSIBLE: Rows = (
    (
        "model.attention_backend",
        lambda c: c.model.attention_backend == "flash" and c.model.attention_dropout > 0,
        "flash does not support attention dropout; set model.attention_dropout to 0, or use fused or auto",
    ),
    (
        "model.attention_backend",
        lambda c: c.model.attention_backend == "fused" and c.model.attn_logit_softcapping is not None,
        "fused cannot be combined with attn_logit_softcapping, which torch's kernels do not have; use flash, unfused "
        "or auto",
    ),
    (
        "parallel.context_parallel_size",
        lambda c: c.parallel.context_parallel_size > 1 and c.model.architecture != "decoder",
        "above 1 divides causal self-attention only, but model.architecture bert and t5 have other attention; set it "
        "to 1, and use tensor or data parallelism",
    ),
    (
        "model.window_size",
        lambda c: c.model.window_size is not None and c.model.architecture != "decoder",
        "needs causal attention, which model.architecture bert and t5 do not have; leave it out",
    ),
    (
        "model.window_layers",
        lambda c: c.model.window_layers != "all" and c.model.window_size is None,
        "needs window_size, without which no layer has a sliding window; set that, or leave this key out",
    ),
    (
        "model.window_layers",
        lambda c: c.model.window_layers != "all" and len(c.model.window_layers) != c.model.num_layers,
        "needs one entry for each of model.num_layers; lengthen or shorten the list, or use all",
    ),
    (
        "model.no_rope_freq",
        lambda c: c.model.no_rope_freq is not None and c.model.position_embedding_type != "rope",
        "is for models with rotary positions, which model.position_embedding_type does not give; set that to rope, or "
        "leave this key out",
    ),
    (
        "model.no_rope_freq",
        lambda c: isinstance(c.model.no_rope_freq, list) and len(c.model.no_rope_freq) != c.model.num_layers,
        "needs one entry for each of model.num_layers; lengthen or shorten the list, or use a number",
    ),
    (
        "model.no_rope_freq",
        lambda c: c.model.no_rope_freq is not None and c.model.multi_latent_attention,
        "is not supported with multi_latent_attention, which rotates in every layer; leave one of them out",
    ),
    (
        "parallel.data_parallel_sharding_strategy",
        lambda c: _splits_backward(c) and c.parallel.zero_stage >= 2,
        "optim_grads and optim_grads_params need an undivided backward, but the zero-bubble schedules split it; use "
        "optim, or another parallel.pipeline_schedule",
    ),
    (
        "parallel.data_parallel_sharding_strategy",
        lambda c: c.parallel.use_distributed_optimizer and c.parallel.data_parallel_sharding_strategy == "no_shard",
        "no_shard contradicts parallel.use_distributed_optimizer; use optim, or switch the distributed optimizer off",
    ),
    (
        "parallel.data_parallel_sharding_strategy",
        lambda c: (
            c.parallel.zero_stage >= 2
            and c.parallel.pipeline_model_parallel_size == 1
            and virtual_stages_per_rank(c) > 1
            and (c.model.mtp_num_layers > 0 or not c.model.untie_embeddings_and_output_weights)
        ),
        "optim_grads and optim_grads_params shard each virtual stage separately, but here two virtual stages of one "
        "rank share the word table, for the output or for multi-token prediction; leave out the virtual stages, which "
        "need a pipeline to be useful",
    ),
    (
        "parallel.pipeline_model_parallel_layout",
        lambda c: _is_short_of_chunks(c) and c.parallel.pipeline_model_parallel_layout is not None,
        "gives fewer than the two virtual stages per rank that parallel.pipeline_schedule interleaved needs; use more "
        "stages, or leave parallel.pipeline_schedule out",
    ),
    (
        "parallel.num_layers_per_virtual_pipeline_stage",
        lambda c: _is_short_of_chunks(c) and c.parallel.num_layers_per_virtual_pipeline_stage is not None,
        "gives one virtual stage per rank, but parallel.pipeline_schedule interleaved needs two or more; lower it, or "
        "leave parallel.pipeline_schedule out",
    ),
    (
        "parallel.pipeline_schedule",
        _is_short_of_chunks,
        "interleaved needs two or more virtual stages per rank; set parallel.num_virtual_stages_per_pipeline_rank to 2",
    ),
    (
        "parallel.pipeline_schedule",
        _has_chunks_to_spare,
        "gpipe, 1f1b and zb-h1 have one virtual stage per rank; use interleaved, or leave out the key that sets more: "
        "num_virtual_stages_per_pipeline_rank, num_layers_per_virtual_pipeline_stage or "
        "pipeline_model_parallel_layout",
    ),
    (
        "parallel.num_virtual_stages_per_pipeline_rank",
        lambda c: (
            c.parallel.pipeline_schedule == "zb-v"
            and c.parallel.num_virtual_stages_per_pipeline_rank not in (None, default_chunks("zb-v"))
        ),
        "is always 2 with parallel.pipeline_schedule zb-v; leave it out",
    ),
    (
        "parallel.num_layers_per_virtual_pipeline_stage",
        lambda c: (
            c.parallel.num_layers_per_virtual_pipeline_stage is not None and c.parallel.pipeline_schedule == "zb-v"
        ),
        "cannot be combined with parallel.pipeline_schedule zb-v, which has two virtual stages per rank; leave it out",
    ),
    (
        "parallel.decoder_first_pipeline_num_layers",
        lambda c: c.parallel.decoder_first_pipeline_num_layers is not None and c.parallel.pipeline_schedule == "zb-v",
        "cannot be combined with parallel.pipeline_schedule zb-v, whose first rank holds both ends of the model; use "
        "parallel.pipeline_model_parallel_layout instead",
    ),
    (
        "parallel.decoder_last_pipeline_num_layers",
        lambda c: c.parallel.decoder_last_pipeline_num_layers is not None and c.parallel.pipeline_schedule == "zb-v",
        "cannot be combined with parallel.pipeline_schedule zb-v, whose last rank holds the middle of the model; use "
        "parallel.pipeline_model_parallel_layout instead",
    ),
    (
        "parallel.expert_model_parallel_size",
        lambda c: c.parallel.expert_model_parallel_size > 1 and c.model.num_experts is None,
        "above 1 needs experts, but the model is dense; set model.num_experts, or leave this key out",
    ),
    (
        "parallel.expert_tensor_parallel_size",
        lambda c: (
            c.model.num_experts is not None
            and c.parallel.tensor_model_parallel_size % (c.parallel.expert_tensor_parallel_size or 1) != 0
        ),
        "must divide parallel.tensor_model_parallel_size, which is the default; use 1, or leave it out",
    ),
    (
        "model.moe_router_topk",
        lambda c: c.model.num_experts is not None and c.model.moe_router_topk > c.model.num_experts,
        "is above model.num_experts; lower it to at most that number",
    ),
    (
        "model.moe_router_pre_softmax",
        lambda c: (
            c.model.num_experts is not None
            and c.model.moe_router_topk == 1
            and c.model.router_score_function == "softmax"
            and not c.model.router_pre_softmax
        ),
        "must be on with moe_router_topk 1: the softmax over a single expert is always 1, so that the router would "
        "never learn; switch it on, or use moe_router_score_function sigmoid",
    ),
    (
        "model.moe_router_pre_softmax",
        lambda c: c.model.moe_router_pre_softmax and c.model.moe_router_score_function != "softmax",
        "needs moe_router_score_function softmax, but that is sigmoid; change it, or leave this key out",
    ),
    (
        "model.moe_aux_loss_coeff",
        lambda c: c.model.moe_aux_loss_coeff > 0 and c.model.moe_router_load_balancing_type in ("sinkhorn", "none"),
        "above 0 contradicts moe_router_load_balancing_type sinkhorn or none, which have no such loss; use aux_loss or "
        "seq_aux_loss, or leave the coefficient out",
    ),
    (
        "model.moe_token_drop_policy",
        lambda c: c.model.moe_token_drop_policy != "probs" and c.model.moe_expert_capacity_factor is None,
        "needs moe_expert_capacity_factor, without which no token is dropped; set that, or leave this key out",
    ),
    (
        "model.norm_placement",
        lambda c: c.model.parallel_residual and c.model.norm_placement != "pre",
        "must be pre with parallel_residual, whose sublayers read one norm each; leave it out, or switch "
        "parallel_residual off",
    ),
    (
        "model.shared_parallel_norm",
        lambda c: c.model.shared_parallel_norm and not c.model.parallel_residual,
        "needs parallel_residual, which is off; switch that on, or leave this key out",
    ),
    (
        "model.position_embedding_offset",
        lambda c: c.model.position_embedding_offset > 0 and c.model.position_embedding_type != "learned_absolute",
        "needs position_embedding_type learned_absolute; set that, or leave this key out",
    ),
    (
        "model.activation_func",
        lambda c: (
            c.model.activation_func is not None and (c.model.swiglu or c.model.openai_gelu or c.model.squared_relu)
        ),
        "cannot be combined with swiglu, openai_gelu or squared_relu, which name the activation too; leave out one of "
        "them, and set gated_linear_unit for gates",
    ),
    (
        "model.squared_relu",
        lambda c: c.model.squared_relu and (c.model.swiglu or c.model.openai_gelu),
        "cannot be combined with swiglu or openai_gelu, which name another activation; leave out one of them",
    ),
    (
        "model.activation_clamp",
        lambda c: c.model.activation_clamp is not None and not c.model.is_gated,
        "bounds gates and ups, but this model has none; set swiglu or gated_linear_unit, or leave this key out",
    ),
    (
        "model.activation_alpha",
        lambda c: c.model.activation_alpha is not None and not (c.model.is_gated and c.model.activation == "silu"),
        "is a form of SwiGLU; set swiglu, or leave this key out",
    ),
    (
        "training.recompute_method",
        lambda c: c.training.recompute_granularity == "full" and c.training.recompute_method is None,
        "is unset, but recompute_granularity full needs it; use uniform or block",
    ),
    (
        "training.recompute_method",
        lambda c: c.training.recompute_granularity != "full" and c.training.recompute_method is not None,
        "needs recompute_granularity full; set that, or leave this key out",
    ),
    (
        "training.recompute_num_layers",
        lambda c: c.training.recompute_granularity != "full" and c.training.recompute_num_layers is not None,
        "needs recompute_granularity full; set that, or leave this key out",
    ),
    (
        "training.recompute_modules",
        lambda c: bool(c.training.recompute_modules) and c.training.recompute_granularity != "selective",
        "needs recompute_granularity selective; set that, or leave this key out",
    ),
    (
        "training.recompute_modules",
        lambda c: c.model.num_experts is None and any(m in _EXPERT_MODULES for m in c.training.recompute_modules),
        "moe and moe_act need mixture-of-experts layers, but the model is dense; use core_attn, mlp, mlp_act or "
        "layernorm",
    ),
    (
        "training.recompute_modules",
        lambda c: any(m in _DENSE_MODULES for m in c.training.recompute_modules) and not c.model.has_dense_layers,
        "mlp and mlp_act need a dense feed-forward layer, but all layers of this model have experts; use moe or "
        "moe_act",
    ),
    (
        "training.loss_chunk_size",
        lambda c: c.training.loss_chunk_size is not None and c.training.cross_entropy_fusion_impl != "linear",
        "needs cross_entropy_fusion_impl linear; set that, or leave this key out",
    ),
    (
        "training.cross_entropy_fusion_impl",
        lambda c: c.training.cross_entropy_fusion_impl == "linear" and _splits_backward(c),
        "linear cannot be combined with pipeline_schedule zb-h1 or zb-v, which keep the gradient of all logits until "
        "the backward of weights; use pipeline_schedule 1f1b or interleaved, or leave this key out",
    ),
    (
        "model.mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 0 and c.model.architecture != "decoder",
        "needs model.architecture decoder; use that, or leave this key out",
    ),
    (
        "model.mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 0 and c.model.position_embedding_type == "learned_absolute",
        "cannot be combined with learned positions, whose table only the first stage has; use "
        "position_embedding_type rope or none, or leave this key out",
    ),
    (
        "model.mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 0 and (c.model.embedding_size is not None or c.model.add_head_bias),
        "cannot be combined with embedding_size or add_head_bias: prediction layers share two tables with the model, "
        "but no projection and no bias; leave out one of them",
    ),
    (
        "model.embedding_layer_norm",
        lambda c: c.model.embedding_layer_norm and c.model.mtp_num_layers > 0,
        "cannot be combined with mtp_num_layers, whose layers normalize the embedding themselves; leave out one of "
        "them",
    ),
    (
        "model.attention_sinks",
        lambda c: c.model.attention_sinks and c.model.position_embedding_type == "alibi",
        "cannot be combined with position_embedding_type alibi, whose scores are right up to a number for each query, "
        "but a sink needs that too; leave out one of them",
    ),
    (
        "model.attn_logit_softcapping",
        lambda c: c.model.attn_logit_softcapping is not None and c.model.position_embedding_type == "alibi",
        "cannot be combined with position_embedding_type alibi, which adds to the scores; leave out one of them",
    ),
    (
        "model.mtp_loss_scaling_factor",
        lambda c: c.model.mtp_num_layers == 0 and is_changed("model", "mtp_loss_scaling_factor", c),
        "needs mtp_num_layers above 0; set that, or leave this key out",
    ),
    (
        "training.check_weight_hash_across_dp_replicas_interval",
        lambda c: c.training.check_weight_hash_across_dp_replicas_interval is not None and c.parallel.zero_stage >= 2,
        "has no copies to compare with parallel.data_parallel_sharding_strategy optim_grads and optim_grads_params, "
        "which divide the weights between steps; use optim or no_shard, or leave this key out",
    ),
    (
        "hooks.loss_function",
        lambda c: c.hooks.loss_function is not None and c.model.architecture != "decoder",
        "needs model.architecture decoder, since bert and t5 have losses of their own; leave it out",
    ),
    (
        "hooks.loss_function",
        lambda c: c.hooks.loss_function is not None and c.model.mtp_num_layers > 0,
        "cannot be combined with model.mtp_num_layers, whose layers have a loss of their own; leave out one of them",
    ),
    (
        "hooks.loss_function",
        lambda c: c.hooks.loss_function is not None and c.model.z_loss_coeff > 0,
        "cannot be combined with model.z_loss_coeff, a term of the cross entropy that it replaces; leave out one of "
        "them, and add the term in your function",
    ),
    (
        "hooks.lr_function",
        lambda c: c.hooks.lr_function is not None and c.optimizer.decoupled_lr is not None,
        "cannot be combined with optimizer.decoupled_lr, a rate for some weights alone; leave out one of them",
    ),
    (
        "hooks.lr_function",
        lambda c: c.hooks.lr_function is not None and is_changed("optimizer", "lr_decay_style", c),
        "cannot be combined with optimizer.lr_decay_style, which is a schedule too; leave out one of them",
    ),
)


def check_incompatible(config: TrainConfig) -> None:
    """Refuse a combination that is invalid for all numbers.

    Raises:
        ConfigError: names the key, and the remedy.
    """
    refuse_first(IMPOSSIBLE, config)


def refuse_first(rows: Rows, config: TrainConfig) -> None:
    """Refuse the first combination of a table that the config has.

    Raises:
        ConfigError: names the key, and the remedy.
    """
    for key, is_asked_for, sentence in rows:
        if is_asked_for(config):
            raise ConfigError(key, sentence)
