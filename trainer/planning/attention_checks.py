"""Checks of attention's keys: norm of queries and keys, multi-head latent attention, scale by width. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig

_NEEDED = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def check_latent_attention(config: TrainConfig) -> None:
    """Refuse keys of multi-head latent attention that are missing, or that contradict it.

    Raises:
        ConfigError: names the key.
    """
    model = config.model
    for name in ("q_lora_rank", "latent_norm_epsilon", *_NEEDED):
        has_key = getattr(model, name) is not None
        if has_key and not model.multi_latent_attention:
            raise ConfigError(f"model.{name}", "needs multi_latent_attention; switch that on, or leave this key out")
        if model.multi_latent_attention and not has_key and name in _NEEDED:
            raise ConfigError(f"model.{name}", "is unset, but multi_latent_attention needs it; set it")
    if model.multi_latent_attention:
        _check_contradictions(model)


def _check_contradictions(model: ModelConfig) -> None:
    """Refuse keys that contradict multi-head latent attention."""
    if model.position_embedding_type != "rope":
        raise ConfigError(
            "model.position_embedding_type",
            f"{model.position_embedding_type} does not fit multi_latent_attention, whose keys are rotated; use rope",
        )
    if model.query_groups != model.num_attention_heads:
        raise ConfigError(
            "model.num_query_groups",
            f"{model.query_groups} does not fit multi_latent_attention, where each of the {model.num_attention_heads} "
            "heads has its own key; leave it out",
        )
    for name, key in (("kv_channels", "qk_head_dim"), ("rotary_percent", "qk_pos_emb_head_dim")):
        if getattr(model, name) != type(model).model_fields[name].default:
            raise ConfigError(f"model.{name}", f"does not fit multi_latent_attention; set model.{key} instead")
    for name in ("add_qkv_bias", "attention_sinks"):
        if getattr(model, name):
            raise ConfigError(f"model.{name}", "does not fit multi_latent_attention, which has none; leave it out")


def check_query_key_norm(config: TrainConfig) -> None:
    """Refuse a norm over all heads that nothing computes.

    Raises:
        ConfigError: names the key.
    """
    model = config.model
    if model.qk_layernorm_scope == "head":
        return
    if not model.qk_layernorm or model.multi_latent_attention:
        raise ConfigError(
            "model.qk_layernorm_scope",
            "all needs qk_layernorm without multi_latent_attention; switch qk_layernorm on, or leave this key out",
        )
    if model.normalization != "RMSNorm":
        raise ConfigError(
            "model.qk_layernorm_scope",
            f"all needs normalization RMSNorm, but that is {model.normalization}; use head",
        )


def check_base_width(config: TrainConfig) -> None:
    """Refuse what has no rule by width.

    Raises:
        ConfigError: names the key.
    """
    model = config.model
    if model.mup_base_hidden_size is None:
        return
    if model.init_method != "normal":
        raise ConfigError("model.init_method", "xavier_uniform ignores mup_base_hidden_size; leave one of them out")
    if model.embedding_size is not None:
        raise ConfigError(
            "model.embedding_size", "is a second width, without a rule by mup_base_hidden_size; leave it out"
        )
    if model.multi_latent_attention and model.softmax_scale is None:
        raise ConfigError(
            "model.softmax_scale",
            "is unset, but mup_base_hidden_size gives multi_latent_attention none, whose heads have two widths; set it",
        )
