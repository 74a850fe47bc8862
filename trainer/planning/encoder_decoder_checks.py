"""Checks of a model with encoder and decoder. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

OWN = {
    "model": ("decoder_num_layers", "relative_attention_num_buckets", "relative_attention_max_distance"),
    "training": ("decoder_seq_length",),
}
"""Keys, by section, that no other architecture reads."""

READ = frozenset(
    [
        *("architecture", "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
        *("max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon", "apply_layernorm_1p"),
        *("swiglu", "openai_gelu", "squared_relu", "activation_func", "gated_linear_unit", "activation_clamp"),
        *("activation_alpha", "disable_bias_linear", "untie_embeddings_and_output_weights", "softmax_scale"),
        *("attn_logit_softcapping", "final_logit_softcapping", "attention_dropout", "hidden_dropout"),
        *("init_method_std", "vocab_size", "make_vocab_size_divisible_by", *OWN["model"]),
    ]
)
"""Keys of section ``model`` that architecture t5 reads."""


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
            if _is_changed(config, section, key):
                raise ConfigError(f"{section}.{key}", "needs model.architecture t5; set that, or leave this key out")
    if config.model.position_embedding_type == "relative":
        raise ConfigError(
            "model.position_embedding_type",
            "relative needs model.architecture t5; use rope, learned_absolute or none",
        )


def _is_changed(config: TrainConfig, section: str, key: str) -> bool:
    values = getattr(config, section)
    return bool(getattr(values, key) != type(values).model_fields[key].default)


def _check_model(config: TrainConfig) -> None:
    model = config.model
    if model.position_embedding_type != "relative":
        raise ConfigError(
            "model.position_embedding_type",
            f"{model.position_embedding_type} is not available for model.architecture t5; use relative",
        )
    if not model.disable_bias_linear:
        raise ConfigError("model.disable_bias_linear", "must be true for model.architecture t5, which has no biases")
    for key in type(model).model_fields:
        if key not in READ and _is_changed(config, "model", key):
            raise ConfigError(f"model.{key}", "has no meaning for model.architecture t5; leave it out")
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
