"""Relations that must hold between the keys of a training config, and between it and the size of a job. Torch-free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.config.data_checks import check_data
from trainer.config.errors import ConfigError
from trainer.planning.kernel_choice import check_kernels
from trainer.planning.layouts import Layout, nearest_layouts
from trainer.planning.parallel_checks import (
    check_parallelism,
    divisors,
    fits_context_parallel,
    fits_tensor_parallel,
    multiples_around,
)
from trainer.planning.pipeline import virtual_stages_per_rank

if TYPE_CHECKING:
    from trainer.config.sections import ModelConfig
    from trainer.config.train_config import TrainConfig


MOST_MICRO_BATCHES = 100_000
"""Per replica and iteration: the table of a pipeline schedule holds every one of them."""


def check_relations(config: TrainConfig) -> None:
    """Refuse keys that contradict each other, whatever the size of the job.

    Raises:
        ConfigError: names the key, the numbers and the nearest that are valid.
    """
    _check_attention(config.model)
    _check_activation(config.model)
    check_parallelism(config)
    _check_training(config)
    _check_optimizer(config)
    check_data(config.data)
    check_kernels(config)


def check_world_size(config: TrainConfig, world_size: int) -> None:
    """Refuse a layout or batch size that does not fit ``world_size`` ranks.

    Raises:
        ConfigError: names the numbers and the nearest that fit.
    """
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    if world_size % (tp * cp * pp):
        with_cp = f" x CP {cp}" if cp > 1 else ""
        raise ConfigError(
            "parallel.tensor_model_parallel_size",
            f"TP {tp} x PP {pp}{with_cp} = {tp * pp * cp} does not divide the world size {world_size}; nearest layouts "
            f"that fit: {'; '.join(_nearest_layouts(config, world_size)) or 'none; ask for another number of ranks'}",
        )
    dp = config.data_parallel_size(world_size)
    if dp * cp % ep:
        raise ConfigError(
            "parallel.expert_model_parallel_size",
            f"{ep} does not divide DP {dp} x CP {cp} = {dp * cp}, over which experts are divided; use one of "
            f"{divisors(math.gcd(dp * cp, config.model.num_experts or 1))}",
        )
    global_batch_size, step = config.global_batch_size(dp), config.training.micro_batch_size * dp
    if global_batch_size % step:
        raise ConfigError(
            "training.global_batch_size",
            f"{global_batch_size} is not divisible by micro_batch_size {config.training.micro_batch_size} x DP {dp} "
            f"= {step}; use {multiples_around(global_batch_size, step)}",
        )
    if global_batch_size // step > MOST_MICRO_BATCHES:
        raise ConfigError(
            "training.global_batch_size",
            f"{global_batch_size} makes {global_batch_size // step:,} micro-batches per replica and iteration; at most "
            f"{MOST_MICRO_BATCHES:,} can be scheduled, which is a batch of {MOST_MICRO_BATCHES * step:,}",
        )


def _nearest_layouts(config: TrainConfig, world_size: int) -> list[str]:
    parallel, training = config.parallel, config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    # An explicit division of the layers is one for this pipeline.
    has_counts = parallel.pipeline_model_parallel_layout or parallel.num_layers_per_virtual_pipeline_stage
    has_counts = has_counts or (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    ) != (
        None,
        None,
    )

    def fits(layout: Layout) -> bool:
        other_tp, other_cp, other_pp = layout
        return (
            (
                other_pp == pp
                if has_counts
                else other_pp * virtual_stages_per_rank(config) <= config.model.num_layers + 2
            )
            and fits_tensor_parallel(config.model, other_tp)
            and fits_context_parallel(config, other_tp, other_cp)
            and (other_cp == 1 or cp > 1)
        )

    near = nearest_layouts(world_size, (tp, cp, pp), fits)
    # Experts may fit none; that is said once the rest fits.
    near = [layout for layout in near if world_size // (layout[0] * layout[2]) % ep == 0] or near
    batch_size, micro_batch_size = training.global_batch_size, training.micro_batch_size
    # A layout whose batch does not divide would only be refused next; say one that is not, where there is any.
    batched = [
        layout
        for layout in near
        if batch_size is None or batch_size % (micro_batch_size * (world_size // math.prod(layout))) == 0
    ]
    return [_layout_in_words(layout, world_size) for layout in (batched or near)[:3]]


def _layout_in_words(layout: Layout, world_size: int) -> str:
    tp, cp, pp = layout
    with_cp = f" x CP {cp}" if cp > 1 else ""
    return f"TP {tp} x PP {pp}{with_cp} x DP {world_size // (tp * cp * pp)}"


def _check_attention(model: ModelConfig) -> None:
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        raise ConfigError(
            "model.num_attention_heads",
            f"{heads} heads do not divide hidden_size {model.hidden_size}; use one of {divisors(model.hidden_size)}, "
            "or set model.kv_channels",
        )
    if heads % model.query_groups:
        raise ConfigError(
            "model.num_query_groups",
            f"{model.query_groups} query groups do not divide {heads} attention heads; use one of {divisors(heads)}",
        )
    if model.group_query_attention and model.num_query_groups is None:
        raise ConfigError(
            "model.num_query_groups", "is needed with group_query_attention; use one of " + divisors(heads)
        )
    rotated = int(model.head_dim * model.rotary_percent)
    if model.position_embedding_type == "rope" and (rotated % 2 or not rotated):
        raise ConfigError(
            "model.rotary_percent",
            f"rotates {rotated} of {model.head_dim} channels per head; choose width and share so that it is an even "
            "number above zero",
        )


def _check_activation(model: ModelConfig) -> None:
    if model.openai_gelu and model.swiglu:
        raise ConfigError("model.openai_gelu", "is a form of GeLU, which swiglu replaces; switch one of the two off")


def _check_training(config: TrainConfig) -> None:
    training, model = config.training, config.model
    if training.bf16 and training.fp16:
        raise ConfigError("training.fp16", "bf16 and fp16 exclude each other; switch one off")
    if model.position_embedding_type != "none" and config.max_position_embeddings < training.seq_length:
        raise ConfigError(
            "model.max_position_embeddings",
            f"{config.max_position_embeddings} is below training.seq_length {training.seq_length}; raise it to that",
        )
    if training.loss_scale is not None and not training.fp16:
        raise ConfigError(
            "training.loss_scale",
            "keeps the gradients of fp16 above its smallest numbers; set fp16 too, or leave it out",
        )
    if training.min_loss_scale > training.initial_loss_scale:
        raise ConfigError(
            "training.min_loss_scale", f"must not exceed initial_loss_scale {training.initial_loss_scale:g}"
        )


def _check_optimizer(config: TrainConfig) -> None:
    optimizer = config.optimizer
    decay_iters = optimizer.lr_decay_iters or config.training.train_iters
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError("optimizer.min_lr", f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}; lower it")
    if optimizer.lr_warmup_init > optimizer.lr:
        raise ConfigError(
            "optimizer.lr_warmup_init",
            f"{optimizer.lr_warmup_init:g} is above lr {optimizer.lr:g}, which warmup rises to; lower it",
        )
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        raise ConfigError("optimizer.lr_warmup_fraction", "excludes lr_warmup_iters; set only one of the two")
    if optimizer.lr_decay_style != "constant" and 0 < decay_iters < optimizer.lr_warmup_iters:
        raise ConfigError(
            "optimizer.lr_warmup_iters",
            f"{optimizer.lr_warmup_iters} is beyond the {decay_iters} iterations that the learning rate decays over; "
            "lower it or raise optimizer.lr_decay_iters",
        )
