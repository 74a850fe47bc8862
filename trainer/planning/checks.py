"""Checks of relations between config keys, and to the job's size. Torch-free.

RELATIONS lists the relations that only some configs can break, each with the keys that it is about. A check is imported
and runs only if the config sets one of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError, joined
from trainer.config.sections.batch_sizes import MAX_MICRO_BATCHES
from trainer.config.sections.checkpoint import folder_apart
from trainer.planning.layouts import Layout, divisors, nearest_layouts

if TYPE_CHECKING:
    from trainer.config.sections.optimizer import OptimizerConfig
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class Relation:
    """A check that only configs with certain keys can fail.

    Attributes:
        place: ``module:function`` below trainer.planning; the function takes the config and raises ConfigError.
        keys: dotted keys, or beginnings of keys with a ``*``: with the default of all of them nothing is wrong.
    """

    place: str
    keys: tuple[str, ...]

    def concerns(self, given: Collection[str]) -> bool:
        """True if a config that sets the keys ``given`` may fail."""
        names = {key for key in self.keys if not key.endswith("*")}
        beginnings = tuple(key[:-1] for key in self.keys if key.endswith("*"))
        return not names.isdisjoint(given) or any(key.startswith(beginnings) for key in given if beginnings)

    def check(self, config: TrainConfig) -> None:
        """Run the check.

        Raises:
            ConfigError: names the key, its value and the nearest valid values.
        """
        module, _, name = self.place.partition(":")
        getattr(importlib.import_module(f"trainer.planning.{module}"), name)(config)


RELATIONS = (
    Relation("attention_checks:check_query_key_norm", ("model.qk_layernorm_scope",)),
    Relation(
        "attention_checks:check_latent_attention",
        (
            *("model.multi_latent_attention", "model.q_lora_rank", "model.kv_lora_rank", "model.qk_*"),
            *("model.v_head_dim", "model.latent_norm_epsilon"),
        ),
    ),
    Relation("attention_checks:check_base_width", ("model.mup_base_hidden_size",)),
    Relation("rope:check_rope", ("model.rope_scaling", "model.rotary_*", "model.multi_latent_attention", "model.qk_*")),
    Relation("expert_checks:check_experts", ("model.num_experts", "model.moe_*")),
    Relation("parallel_checks:check_exclusive", ("parallel.*",)),
    Relation(
        "incompatible:check_incompatible",
        (
            *("parallel.*", "model.attention_backend", "model.window_*", "model.num_experts", "model.moe_*"),
            *("model.no_rope_freq", "model.attention_sinks", "model.attn_logit_softcapping"),
            *("model.norm_placement", "model.shared_parallel_norm", "model.position_embedding_offset"),
            *("model.activation_*", "model.squared_relu", "model.mtp_*", "training.recompute_*"),
            *("hooks.*", "training.cross_entropy_fusion_impl", "training.loss_chunk_size"),
        ),
    ),
    Relation("optimizer_checks:check_states", ("optimizer.o*", "optimizer.exp_*", "optimizer.main_*", "optimizer.s*")),
    Relation(
        "architecture_checks:check_bert",
        (
            *("model.architecture", "model.num_tokentypes", "model.bert_binary_head"),
            *("data.mask_prob", "data.short_seq_prob"),
        ),
    ),
    Relation("parallel_checks:check_parallelism", ("parallel.*", "training.recompute_modules")),
    Relation("expert_checks:check_expert_keys", ("parallel.*", "model.num_experts", "model.moe_*")),
    Relation(
        "architecture_checks:check_encoder_decoder",
        (
            *("model.architecture", "model.decoder_num_layers"),
            *("model.relative_attention_*", "training.decoder_seq_length"),
            *("model.scale_decoder_output", "model.stack_output_dropout"),
        ),
    ),
    Relation(
        "data_checks:check_data",
        (
            *("data.data_path", "data.train_data_path", "data.valid_data_path", "data.test_data_path", "data.split"),
            *("data.sample_packing", "data.answer_only_loss", "data.streaming*", "hooks.dataset_function"),
            "data.tokenizer_function",
        ),
    ),
    Relation("parallel_checks:check_batch_ramp", ("training.rampup_batch_size",)),
    Relation("parallel_checks:check_batch_steps", ("training.step_batch_size_schedule",)),
    Relation("checkpoint.copies:check_copies", ("checkpoint.copy_interval", "checkpoint.copy_folder")),
    Relation("parallel_checks:check_profile", ("logging.profile_*",)),
    Relation("kernel_choice:check_kernels", ("training.kernel_backends", "parallel.no_gradient_accumulation_fusion")),
)
"""In the order of their messages."""


def check_relations(config: TrainConfig) -> None:
    """Refuse contradicting keys, independently of the size of the job.

    Raises:
        ConfigError: all problems; each names the key, its value and the nearest valid values.
    """
    given = {
        f"{section}.{key}" for section in config.model_fields_set for key in getattr(config, section).model_fields_set
    }
    of_most = (_check_attention, _check_positions, _check_activation)
    concerned = (relation.check for relation in RELATIONS if relation.concerns(given))
    last = (_check_training, _check_optimizer, _check_evaluation, _check_start, _check_roll_back, _check_hugging_face)
    found: list[ConfigError] = []
    for check in (*of_most, *concerned, *last, _check_logging):
        try:
            check(config)
        except ConfigError as error:
            found += error.all
        except (ArithmeticError, LookupError, ValueError):
            # It counts on what an earlier check has refused.
            if not found:
                raise
    if found:
        raise joined(found)


def check_world_size(config: TrainConfig, world_size: int) -> None:
    """Refuse a parallel layout or batch size that does not fit ``world_size`` ranks.

    Raises:
        ConfigError: names the values and the nearest ones that fit.
    """
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    if world_size % (tp * cp * pp):
        with_cp = f" x CP {cp}" if cp > 1 else ""
        raise ConfigError(
            "parallel.tensor_model_parallel_size",
            f"TP {tp} x PP {pp}{with_cp} = {tp * pp * cp} does not divide the world size {world_size}; nearest layouts "
            f"that fit: {'; '.join(_nearest_layouts(config, world_size)) or 'none; use another number of ranks'}",
        )
    dp = config.data_parallel_size(world_size)
    if parallel.expert_model_parallel_size > 1:
        from trainer.planning.expert_checks import check_expert_ranks

        check_expert_ranks(config, dp)
    if config.logging.profile_steps is not None:
        from trainer.planning.parallel_checks import check_profile_ranks

        check_profile_ranks(config, world_size)
    samples, step = config.global_batch_size(dp), config.training.micro_batch_size * dp
    if config.changes_batch_size or samples % step or samples // step > MAX_MICRO_BATCHES:
        from trainer.planning.parallel_checks import check_batches_fit

        check_batches_fit(config, dp)


def _nearest_layouts(config: TrainConfig, world_size: int) -> list[str]:
    from trainer.planning.parallel_checks import fits_context_parallel, fits_tensor_parallel
    from trainer.planning.pipeline import virtual_stages_per_rank

    parallel, training = config.parallel, config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    # Explicit layer counts are only valid for this pipeline size.
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
            and fits_tensor_parallel(config, other_tp)
            and fits_context_parallel(config, other_tp, other_cp)
            and (other_cp == 1 or cp > 1)
        )

    near = nearest_layouts(world_size, (tp, cp, pp), fits)
    # If no layout fits ep, show the others: the check of ep reports the problem once the rest fits.
    shares = parallel.expert_shares_of
    near = [one for one in near if world_size // (one[0] * one[2]) * shares(one[0]) % ep == 0] or near
    is_given = training.global_batch_size is not None or training.step_batch_size_schedule is not None
    batch_size, micro_batch_size = config.global_batch_size(1) if is_given else None, training.micro_batch_size
    # Prefer layouts that divide the global batch: any other would be refused by the next check.
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


def _check_evaluation(config: TrainConfig) -> None:
    evaluation, data = config.evaluation, config.data
    if not evaluation.tasks:
        unused = next((key for key in ("every", "limit") if getattr(evaluation, key) is not None), None)
        if unused is not None:
            raise ConfigError(f"evaluation.{unused}", "has no effect without tasks; set evaluation.tasks")
    elif not (data.tokenizer_model or data.vocab_file or data.tokenizer_function):
        raise ConfigError("evaluation.tasks", "needs a tokenizer; set data.tokenizer_model")


def _check_attention(config: TrainConfig) -> None:
    model = config.model
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads and not model.multi_latent_attention:
        raise ConfigError(
            "model.num_attention_heads",
            f"{heads} does not divide hidden_size {model.hidden_size}; use one of {divisors(model.hidden_size)}, "
            "or set model.kv_channels",
        )
    if model.num_query_groups is not None and heads % model.query_groups:
        raise ConfigError(
            "model.num_query_groups",
            f"{model.query_groups} does not divide num_attention_heads {heads}; use one of {divisors(heads)}",
        )
    if model.group_query_attention and model.num_query_groups is None:
        raise ConfigError(
            "model.num_query_groups", "is unset, but group_query_attention needs it; use one of " + divisors(heads)
        )


def _check_positions(config: TrainConfig) -> None:
    model = config.model
    # Heads of an odd width cannot be rotated in pairs.
    if (
        model.position_embedding_type == "rope"
        and (model.kv_channels or model.hidden_size // model.num_attention_heads) % 2
    ):
        Relation("rope:check_rope", ()).check(config)
    # Here, not among the checks of t5: most configs name their positions, and would load those checks.
    if model.position_embedding_type == "relative" and model.architecture != "t5":
        raise ConfigError(
            "model.position_embedding_type",
            "relative needs model.architecture t5; use rope, learned_absolute or none",
        )


def _check_activation(config: TrainConfig) -> None:
    model = config.model
    if model.openai_gelu and model.swiglu:
        raise ConfigError(
            "model.openai_gelu", "cannot be combined with swiglu, which replaces GeLU; switch one of the two off"
        )


def _check_training(config: TrainConfig) -> None:
    training, model = config.training, config.model
    if training.bf16 and training.fp16:
        raise ConfigError("training.fp16", "cannot be combined with bf16; switch one of the two off")
    if (
        model.position_embedding_type not in ("none", "relative")
        and config.max_position_embeddings < training.seq_length
    ):
        raise ConfigError(
            "model.max_position_embeddings",
            f"{config.max_position_embeddings} is below training.seq_length {training.seq_length}; use at least that",
        )
    if training.loss_scale is not None and not training.fp16:
        raise ConfigError(
            "training.loss_scale",
            "is only used with training.fp16; switch fp16 on, or leave the key out",
        )
    if training.min_loss_scale > training.initial_loss_scale:
        raise ConfigError(
            "training.min_loss_scale",
            f"{training.min_loss_scale:g} is above initial_loss_scale {training.initial_loss_scale:g}; lower it",
        )


def _check_start(config: TrainConfig) -> None:
    """Refuse to save in the folder of the weights, of which the run takes a part only."""
    if not config.continues_save:
        return
    key, save = config.checkpoint.part_left_out, str(config.checkpoint.save)
    if key is not None:
        raise ConfigError(
            "checkpoint.save",
            f"{save} is also checkpoint.load, of which {key} takes a part only, so that an attempt could not tell the "
            f"start from its own checkpoints; save elsewhere, such as in {folder_apart(save, key)}, or leave {key} out",
        )


def _check_roll_back(config: TrainConfig) -> None:
    if config.training.on_loss_spike == "roll_back" and config.checkpoint.save_interval is None:
        raise ConfigError(
            "training.on_loss_spike",
            "roll_back begins again at a checkpoint, and only the end of this run makes one; set "
            "checkpoint.save_interval, or use skip",
        )


def _check_hugging_face(config: TrainConfig) -> None:
    if not config.checkpoint.save_hugging_face:
        return
    # Sixteen families take time to import, and few runs need them.
    from trainer.families.catalogue import family_of_model
    from trainer.families.format.errors import FamilyError

    try:
        family_of_model(config.model)
    except FamilyError as error:
        raise ConfigError(
            "checkpoint.save_hugging_face", f"{error}; change these keys, or leave save_hugging_face out"
        ) from None


def _check_decoupled(optimizer: OptimizerConfig) -> None:
    if optimizer.decoupled_lr is None:
        if optimizer.decoupled_min_lr is not None:
            raise ConfigError("optimizer.decoupled_min_lr", "is only used with decoupled_lr; set it, or leave this out")
        return
    own = optimizer.decoupled
    if own is not None and own.min_lr > own.lr:
        raise ConfigError("optimizer.decoupled_lr", f"{own.lr:g} is below its minimum {own.min_lr:g}; raise it")


def _check_optimizer(config: TrainConfig) -> None:
    optimizer = config.optimizer
    decay_iters = optimizer.lr_decay_iters or config.full_iters
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError("optimizer.min_lr", f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}; lower it")
    _check_decoupled(optimizer)
    if optimizer.lr_warmup_init > optimizer.lr:
        raise ConfigError(
            "optimizer.lr_warmup_init",
            f"{optimizer.lr_warmup_init:g} is above lr {optimizer.lr:g}, the end of warmup; lower it",
        )
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        raise ConfigError(
            "optimizer.lr_warmup_fraction", "cannot be combined with lr_warmup_iters; set only one of the two"
        )
    if optimizer.lr_decay_style == "WSD" and optimizer.lr_wsd_decay_iters is None:
        raise ConfigError("optimizer.lr_wsd_decay_iters", "is unset, but lr_decay_style WSD needs it; set it")
    if (optimizer.lr_wsd_decay_iters or 0) > decay_iters > 0:
        raise ConfigError(
            "optimizer.lr_wsd_decay_iters",
            f"{optimizer.lr_wsd_decay_iters} is above lr_decay_iters {decay_iters}; lower it",
        )
    _check_weight_decay(optimizer)
    if optimizer.lr_decay_style != "constant" and 0 < decay_iters < optimizer.lr_warmup_iters:
        raise ConfigError(
            "optimizer.lr_warmup_iters",
            f"{optimizer.lr_warmup_iters} is above lr_decay_iters {decay_iters}; lower it or raise "
            "optimizer.lr_decay_iters",
        )


def _check_weight_decay(optimizer: OptimizerConfig) -> None:
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            key = "start_weight_decay" if start is not None else "end_weight_decay"
            raise ConfigError(
                f"optimizer.{key}", "needs weight_decay_incr_style linear or cosine; set it, or use weight_decay"
            )
    elif start is None or end is None or end < start:
        raise ConfigError(
            "optimizer.weight_decay_incr_style",
            f"{optimizer.weight_decay_incr_style} needs start_weight_decay and an end_weight_decay of at least that; "
            "set both",
        )


def _check_logging(config: TrainConfig) -> None:
    logging = config.logging
    if (logging.numbers_interval or 0) % (logging.log_interval or 1):
        raise ConfigError(
            "logging.numbers_interval",
            f"{logging.numbers_interval} is not a multiple of logging.log_interval {logging.log_interval}, and only "
            "multiples of that have a row; use one",
        )
