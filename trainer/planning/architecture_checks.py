"""Checks of the architectures that are not decoders: BERT and other masked language models, and T5. Torch-free."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.planning.incompatible import Rows, is_changed, refuse_first

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

OWN = {
    "model": (
        *("decoder_num_layers", "relative_attention_num_buckets", "relative_attention_max_distance"),
        *("scale_decoder_output", "stack_output_dropout"),
    ),
    "training": ("decoder_seq_length",),
}
"""Keys, by section, that no other architecture reads."""

READ = frozenset(
    [
        *("architecture", "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
        *("max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon", "apply_layernorm_1p"),
        *("swiglu", "openai_gelu", "squared_relu", "activation_func", "gated_linear_unit", "activation_clamp"),
        *("activation_alpha", "disable_bias_linear", "untie_embeddings_and_output_weights", "softmax_scale"),
        *("add_head_bias", "rotary_base", "rotary_percent", "rotary_interleaved"),
        *("attn_logit_softcapping", "final_logit_softcapping", "attention_dropout", "hidden_dropout"),
        *(
            "init_method_std",
            "init_method",
            "embedding_init_method_std",
            "vocab_size",
            "make_vocab_size_divisible_by",
            *OWN["model"],
        ),
    ]
)
"""Keys of section ``model`` that architecture t5 reads."""


def _is_bert(config: TrainConfig) -> bool:
    return config.model.architecture == "bert"


def _is_changed_with_bert(section: str, key: str, config: TrainConfig) -> bool:
    return _is_bert(config) and is_changed(section, key, config)


def _is_changed_with_masked(key: str, config: TrainConfig) -> bool:
    return config.model.architecture != "decoder" and is_changed("data", key, config)


def _is_changed_without_masked(key: str, config: TrainConfig) -> bool:
    return config.model.architecture == "decoder" and is_changed("data", key, config)


def _is_changed_without_bert(section: str, key: str, config: TrainConfig) -> bool:
    return not _is_bert(config) and is_changed(section, key, config)


# Keys that only BERT has.
_ONLY_BERT = (
    ("model", "num_tokentypes"),
    ("model", "bert_binary_head"),
)
# Keys of section data that only masked language models have.
_ONLY_MASKED = ("mask_prob", "short_seq_prob")
# Keys that BERT does not have, and the remedy.
_NOT_BERT = (
    ("parallel", "sequence_parallel", "whose binary head needs the first token of whole sequences; switch it off"),
    ("model", "num_experts", "which is trained without experts here; leave it out"),
    ("model", "multi_latent_attention", "which has no latent attention here; switch it off"),
    ("model", "embedding_size", "whose head is as wide as the hidden size here; leave it out"),
    ("model", "embedding_layer_norm", "whose norm follows the sum of the embeddings; switch it off"),
    ("model", "mup_base_hidden_size", "whose heads have no rule by width here; leave it out"),
    ("model", "swiglu", "whose head has no gates; switch it off"),
    ("model", "gated_linear_unit", "whose head has no gates; switch it off"),
)
# Keys of section data that masked language models do not have, and the remedy.
_NOT_MASKED = (
    ("streaming", "which need prepared sentences; use llmctl data prepare --split-sentences"),
    ("sample_packing", "whose samples are sentences of one document; switch it off"),
    ("eod_mask_loss", "whose samples hold no end of a document; switch it off"),
    ("reset_attention_mask", "whose samples hold one document; switch it off"),
    ("reset_position_ids", "whose samples hold one document; switch it off"),
)

OF_BERT: Rows = (
    *(
        (
            f"{section}.{key}",
            partial(_is_changed_without_bert, section, key),
            "needs model.architecture bert; set it, or leave this key out",
        )
        for section, key in _ONLY_BERT
    ),
    *(
        (
            f"{section}.{key}",
            partial(_is_changed_with_bert, section, key),
            f"does not fit model.architecture bert, {why}",
        )
        for section, key, why in _NOT_BERT
    ),
    *(
        (
            f"data.{key}",
            partial(_is_changed_without_masked, key),
            "needs model.architecture bert or t5; set one of them, or leave this key out",
        )
        for key in _ONLY_MASKED
    ),
    *(
        (
            f"data.{key}",
            partial(_is_changed_with_masked, key),
            f"does not fit model.architecture bert and t5, {why}",
        )
        for key, why in _NOT_MASKED
    ),
    (
        "model.num_tokentypes",
        lambda c: _is_bert(c) and c.model.bert_binary_head and c.model.token_types < 2,
        "must be 2 or more with bert_binary_head, whose samples have two parts; leave it out, or switch "
        "bert_binary_head off",
    ),
    (
        "model.position_embedding_type",
        lambda c: _is_bert(c) and c.model.position_embedding_type == "alibi",
        "alibi needs causal attention, which model.architecture bert does not have; use learned_absolute",
    ),
    (
        "model.norm_placement",
        lambda c: _is_bert(c) and c.model.norm_placement not in ("pre", "post"),
        "must be post (BERT) or pre (Megatron-LM's BERT) with model.architecture bert; change it",
    ),
    (
        "model.has_final_norm",
        lambda c: _is_bert(c) and c.model.has_final_norm != (c.model.norm_placement == "pre"),
        "must be on with norm_placement pre, and off with post, whose last layer ends with a norm, in a model of "
        "architecture bert; change it",
    ),
    (
        "model.attention_backend",
        lambda c: _is_bert(c) and c.model.attention_backend == "flash",
        "flash has no padding mask, which model.architecture bert needs; use auto, fused or unfused",
    ),
)


def check_bert(config: TrainConfig) -> None:
    """Refuse a combination that contradicts BERT, or any masked language model.

    Raises:
        ConfigError: names the key, and the remedy.
    """
    refuse_first(OF_BERT, config)


def check_encoder_decoder(config: TrainConfig) -> None:
    """Refuse keys that do not fit architecture t5, or that no other architecture reads.

    Raises:
        ConfigError: names the key, its value and what is valid.
    """
    if config.model.architecture == "t5":
        _check_model(config)
        _check_layout(config)
        return
    for section, keys in OWN.items():
        for key in keys:
            if is_changed(section, key, config):
                raise ConfigError(f"{section}.{key}", "needs model.architecture t5; set that, or leave this key out")


def _check_model(config: TrainConfig) -> None:
    model = config.model
    if model.position_embedding_type not in ("relative", "learned_absolute", "rope"):
        raise ConfigError(
            "model.position_embedding_type",
            f"{model.position_embedding_type} is not available for model.architecture t5; use relative, "
            "learned_absolute or rope",
        )
    for key in type(model).model_fields:
        if key not in READ and is_changed("model", key, config):
            raise ConfigError(f"model.{key}", "has no meaning for model.architecture t5; leave it out")
    _check_positions(config)


def _check_positions(config: TrainConfig) -> None:
    model, length = config.model, config.training.decoder_seq_length
    if model.position_embedding_type != "relative":
        for key in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            if is_changed("model", key, config):
                raise ConfigError(
                    f"model.{key}", "needs position_embedding_type relative; set that, or leave this key out"
                )
        if length > config.max_position_embeddings:
            raise ConfigError(
                "training.decoder_seq_length",
                f"{length} is above model.max_position_embeddings {config.max_position_embeddings}; lower it, or raise "
                "max_position_embeddings",
            )
        return
    buckets, farthest = model.relative_attention_num_buckets, model.relative_attention_max_distance
    if buckets < 4 or buckets % 2:
        raise ConfigError("model.relative_attention_num_buckets", f"{buckets} is not an even number from 4 on; use 32")
    if farthest <= buckets // 2:
        raise ConfigError(
            "model.relative_attention_max_distance",
            f"{farthest} is not above half of relative_attention_num_buckets {buckets}; use {buckets // 2 + 1} or more",
        )


def _check_layout(config: TrainConfig) -> None:
    parallel, length = config.parallel, config.training.decoder_seq_length
    tp = parallel.tensor_model_parallel_size
    if parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "parallel.pipeline_model_parallel_size",
            "above 1 cannot divide model.architecture t5, whose decoder layers all read the encoder's output; set it "
            "to 1, and use tensor or data parallelism",
        )
    if parallel.zero_stage >= 2:
        raise ConfigError(
            "parallel.data_parallel_sharding_strategy",
            "optim_grads and optim_grads_params are not available for model.architecture t5, whose stacks share the "
            "word table; use optim",
        )
    if parallel.sequence_parallel and length % tp:
        raise ConfigError(
            "training.decoder_seq_length",
            f"{length} is not divisible by tensor_model_parallel_size {tp}, as sequence_parallel requires; use "
            f"{length // tp * tp or tp} or {-(-length // tp) * tp}, or switch parallel.sequence_parallel off",
        )
