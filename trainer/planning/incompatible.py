"""Incompatible settings of a training config, each with its error message. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.planning.pipeline import pipeline_schedule, virtual_stages_per_rank
from trainer.planning.schedule.placement import default_chunks

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_EXPERT_MODULES = ("moe", "moe_act")


def _is_ring(config: TrainConfig) -> bool:
    return config.parallel.context_parallel_size > 1 and config.parallel.cp_comm_type == "p2p"


def _splits_backward(config: TrainConfig) -> bool:
    return pipeline_schedule(config) in ("zb-h1", "zb-v")


def _is_short_of_chunks(config: TrainConfig) -> bool:
    schedule = config.parallel.pipeline_schedule
    return schedule is not None and virtual_stages_per_rank(config) < default_chunks(schedule)


def _has_chunks_to_spare(config: TrainConfig) -> bool:
    schedule = config.parallel.pipeline_schedule
    return schedule is not None and default_chunks(schedule) == 1 < virtual_stages_per_rank(config)


# (key to name, True if the config has this combination, message)
IMPOSSIBLE: tuple[tuple[str, Callable[[TrainConfig], bool], str], ...] = (
    (
        "model.attention_dropout",
        lambda c: _is_ring(c) and c.model.attention_dropout > 0,
        "above 0 is not supported with ring attention, which never holds complete scores; set it to 0, or set "
        "parallel.cp_comm_type to a2a",
    ),
    (
        "model.attention_backend",
        lambda c: c.model.attention_backend in ("flash", "fused") and c.model.attention_dropout > 0,
        "flash and fused do not support attention dropout; set model.attention_dropout to 0, or use unfused or auto",
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
            and not c.model.untie_embeddings_and_output_weights
        ),
        "optim_grads and optim_grads_params shard each virtual stage separately, but here two virtual stages of one "
        "rank share the tied embedding; leave out the virtual stages, which need a pipeline to be useful, or set "
        "model.untie_embeddings_and_output_weights",
    ),
    (
        "optimizer.optimizer_cpu_offload",
        lambda c: c.optimizer.optimizer_cpu_offload and c.parallel.zero_stage >= 2,
        "needs unsharded parameters on the device; use parallel.data_parallel_sharding_strategy optim, or leave it out",
    ),
    (
        "optimizer.optimizer_offload_fraction",
        lambda c: c.optimizer.optimizer_offload_fraction != 1.0 and not c.optimizer.optimizer_cpu_offload,
        "is only used with optimizer_cpu_offload, which is off; switch that on, or leave this key out",
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
        lambda c: c.parallel.expert_tensor_parallel_size not in (None, c.parallel.tensor_model_parallel_size),
        "must equal parallel.tensor_model_parallel_size; leave it out",
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
            and c.model.moe_router_score_function == "softmax"
            and not c.model.moe_router_pre_softmax
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
        lambda c: c.model.moe_aux_loss_coeff > 0 and c.model.moe_router_load_balancing_type == "none",
        "above 0 contradicts moe_router_load_balancing_type none; use aux_loss, or leave the coefficient out",
    ),
    (
        "model.moe_token_drop_policy",
        lambda c: c.model.moe_token_drop_policy != "probs" and c.model.moe_expert_capacity_factor is None,
        "needs moe_expert_capacity_factor, without which no token is dropped; set that, or leave this key out",
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
        "moe and moe_act need mixture-of-experts layers, but the model is dense; use core_attn, mlp or layernorm",
    ),
    (
        "training.recompute_modules",
        lambda c: "mlp" in c.training.recompute_modules and not c.model.has_dense_layers,
        "mlp needs a dense feed-forward layer, but all layers of this model have experts; use moe or moe_act",
    ),
)
