"""What excludes each other in a training config whatever the numbers, each with its sentence. Torch-free."""

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


# (key to blame, whether the config asks for it, the sentence)
IMPOSSIBLE: tuple[tuple[str, Callable[[TrainConfig], bool], str], ...] = (
    (
        "model.attention_dropout",
        lambda c: _is_ring(c) and c.model.attention_dropout > 0,
        "above 0 is not available in ring attention, whose scores are never whole; set it to 0, or "
        "parallel.cp_comm_type to a2a",
    ),
    (
        "model.attention_backend",
        lambda c: c.model.attention_backend in ("flash", "fused") and c.model.attention_dropout > 0,
        "flash and fused have no dropout on their scores, which they never keep; set model.attention_dropout to 0, or "
        "use unfused or auto",
    ),
    (
        "parallel.data_parallel_sharding_strategy",
        lambda c: _splits_backward(c) and c.parallel.zero_stage >= 2,
        "optim_grads and optim_grads_params gather and reduce around a whole backward, which the zero-bubble schedules "
        "split; use optim, or another parallel.pipeline_schedule",
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
        "optim_grads and optim_grads_params shard each virtual stage by itself, but here two of one rank share "
        "the tied table; leave out the virtual stages, which gain nothing without a pipeline, or set "
        "model.untie_embeddings_and_output_weights",
    ),
    (
        "optimizer.optimizer_cpu_offload",
        lambda c: c.optimizer.optimizer_cpu_offload and c.parallel.zero_stage >= 2,
        "goes with whole parameters on the device; use parallel.data_parallel_sharding_strategy optim, or leave it out",
    ),
    (
        "optimizer.optimizer_offload_fraction",
        lambda c: c.optimizer.optimizer_offload_fraction != 1.0 and not c.optimizer.optimizer_cpu_offload,
        "says how much optimizer_cpu_offload moves to the CPU, which is off; switch that on, or leave it out",
    ),
    (
        "parallel.pipeline_model_parallel_layout",
        lambda c: _is_short_of_chunks(c) and c.parallel.pipeline_model_parallel_layout is not None,
        "has not the two or more virtual stages per rank that parallel.pipeline_schedule interleaved needs; divide it "
        "further, or leave parallel.pipeline_schedule out",
    ),
    (
        "parallel.num_layers_per_virtual_pipeline_stage",
        lambda c: _is_short_of_chunks(c) and c.parallel.num_layers_per_virtual_pipeline_stage is not None,
        "makes one virtual stage per rank, but parallel.pipeline_schedule interleaved needs two or more; lower it, or "
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
        "gpipe, 1f1b and zb-h1 have one virtual stage per rank; use interleaved, or leave out the key that asks for "
        "more: num_virtual_stages_per_pipeline_rank, num_layers_per_virtual_pipeline_stage or a longer "
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
        "does not go with parallel.pipeline_schedule zb-v, whose ranks hold two virtual stages each; leave it out",
    ),
    (
        "parallel.decoder_first_pipeline_num_layers",
        lambda c: c.parallel.decoder_first_pipeline_num_layers is not None and c.parallel.pipeline_schedule == "zb-v",
        "counts the layers after the embedding, but with parallel.pipeline_schedule zb-v that rank holds the end of "
        "the model as well; say where the layers go by parallel.pipeline_model_parallel_layout",
    ),
    (
        "parallel.decoder_last_pipeline_num_layers",
        lambda c: c.parallel.decoder_last_pipeline_num_layers is not None and c.parallel.pipeline_schedule == "zb-v",
        "counts the layers before the LM head, but with parallel.pipeline_schedule zb-v the last rank holds the middle "
        "of the model; say where the layers go by parallel.pipeline_model_parallel_layout",
    ),
    (
        "parallel.expert_model_parallel_size",
        lambda c: c.parallel.expert_model_parallel_size > 1 and c.model.num_experts is None,
        "above 1 divides experts, of which a dense model has none; set model.num_experts, or leave it out",
    ),
    (
        "parallel.expert_tensor_parallel_size",
        lambda c: c.parallel.expert_tensor_parallel_size not in (None, c.parallel.tensor_model_parallel_size),
        "cannot differ from parallel.tensor_model_parallel_size; leave it out",
    ),
    (
        "model.moe_router_topk",
        lambda c: c.model.num_experts is not None and c.model.moe_router_topk > c.model.num_experts,
        "is above model.num_experts; no token can go to more experts than there are",
    ),
    (
        "model.moe_router_pre_softmax",
        lambda c: (
            c.model.num_experts is not None
            and c.model.moe_router_topk == 1
            and c.model.moe_router_score_function == "softmax"
            and not c.model.moe_router_pre_softmax
        ),
        "must be on with moe_router_topk 1: the softmax over a single choice is always 1, so that the router would "
        "never learn; switch it on, or use moe_router_score_function sigmoid",
    ),
    (
        "model.moe_router_pre_softmax",
        lambda c: c.model.moe_router_pre_softmax and c.model.moe_router_score_function != "softmax",
        "says when the softmax is taken, but moe_router_score_function sigmoid takes none; leave it out, or use "
        "softmax",
    ),
    (
        "model.moe_aux_loss_coeff",
        lambda c: c.model.moe_aux_loss_coeff > 0 and c.model.moe_router_load_balancing_type == "none",
        "above 0 contradicts moe_router_load_balancing_type none; use aux_loss, or leave the coefficient out",
    ),
    (
        "model.moe_token_drop_policy",
        lambda c: c.model.moe_token_drop_policy != "probs" and c.model.moe_expert_capacity_factor is None,
        "says which tokens are dropped, but without moe_expert_capacity_factor none ever is; set that, or leave it out",
    ),
    (
        "training.recompute_method",
        lambda c: c.training.recompute_granularity == "full" and c.training.recompute_method is None,
        "is needed with recompute_granularity full; use uniform or block",
    ),
    (
        "training.recompute_method",
        lambda c: c.training.recompute_granularity != "full" and c.training.recompute_method is not None,
        "goes with recompute_granularity full; set that, or leave it out",
    ),
    (
        "training.recompute_num_layers",
        lambda c: c.training.recompute_granularity != "full" and c.training.recompute_num_layers is not None,
        "goes with recompute_granularity full; set that, or leave it out",
    ),
    (
        "training.recompute_modules",
        lambda c: bool(c.training.recompute_modules) and c.training.recompute_granularity != "selective",
        "goes with recompute_granularity selective; set that, or leave it out",
    ),
    (
        "training.recompute_modules",
        lambda c: c.model.num_experts is None and any(m in _EXPERT_MODULES for m in c.training.recompute_modules),
        "moe and moe_act are parts of mixture-of-experts layers, of which a dense model has none; use core_attn, mlp "
        "or layernorm",
    ),
    (
        "training.recompute_modules",
        lambda c: "mlp" in c.training.recompute_modules and not c.model.has_dense_layers,
        "mlp is the feed-forward part of layers without experts, of which this model has none; use moe or moe_act",
    ),
)
