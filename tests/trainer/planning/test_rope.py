"""Refusals of attention's keys: rope_scaling, norms of queries and keys, multi-head latent attention."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config

ROPE = {"position_embedding_type": "rope"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 4} | {
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3],
}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LATENT = {
    **ROPE,
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}


def config(model: dict[str, Any]) -> TrainConfig:
    return build_config(
        {
            "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, **model},
            "training": {"train_iters": 1, "seq_length": 8},
            "optimizer": {"lr": 0.1},
        }
    )


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {},
        {"rope_type": "default"},
        {"type": "linear", "factor": 2},
        {"type": "yarn", **YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0},
        {**YARN, "attention_factor": None, "truncate": False},
        {**YARN, "llama_4_scaling_beta": 0.1},
        LONGROPE,
        {**LONGROPE, "attention_factor": 1.2},
        LLAMA3,
    ],
)
def test_accepted(scaling: dict[str, Any] | None) -> None:
    config({**ROPE, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "ntk"}, "ntk is not supported; use one of default, linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "longrope", "factor": 2}, "needs original_max_position_embeddings, short_factor, long_factor"),
        ({**LONGROPE, "short_factor": [1.0]}, "short_factor has 1 numbers, but a head has 2 pairs of rotated channels"),
        ({**LONGROPE, "long_factor": 2.0}, "long_factor is 2.0; use a list of numbers"),
        ({**LONGROPE, "long_factor": [1.0, 0]}, "long_factor[1] is 0; use a number above 0"),
        ({"factor": 8}, "has no rope_type"),
        ({"rope_type": "yarn", "type": "linear", "factor": 8}, "contradict each other"),
        ({"rope_type": "llama3", "factor": 8}, "needs low_freq_factor, high_freq_factor, original_max"),
        ({"rope_type": "linear"}, "rope_type linear needs factor"),
        ({**YARN, "short_factor": [1.0]}, "short_factor is unknown; rope_type yarn has factor, original_max"),
        ({"rope_type": "default", "factor": 2}, "factor is unknown; rope_type default takes no numbers"),
        ({"rope_type": "linear", "factor": "large"}, "factor is 'large'; use a number above 0"),
        ({"rope_type": "linear", "factor": True}, "factor is True; use a number above 0"),
        ({"rope_type": "linear", "factor": 0.5}, "use at least 1"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({**YARN, "beta_fast": -1}, "beta_fast is -1"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_slow 2 is not below beta_fast 1"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor 4 is not below high_freq_factor 4"),
        ({**YARN, "truncate": 1}, "truncate is 1; use true or false"),
    ],
)
def test_refused_scaling(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config({**ROPE, "rope_scaling": scaling})
    assert caught.value.key == "model.rope_scaling"
    assert said in caught.value.problem


@pytest.mark.parametrize(
    ("model", "key", "said", "change"),
    [
        ({"rope_scaling": LLAMA3}, "rope_scaling", "needs position_embedding_type rope", ROPE),
        ({"rotary_interleaved": True}, "rotary_interleaved", "needs position_embedding_type rope", ROPE),
        ({**ROPE, "rotary_base_local": 1e4}, "rotary_base_local", "set model.window_size", {"window_size": 4}),
        ({"qk_layernorm_scope": "all", "normalization": "RMSNorm"}, "qk_layernorm_scope", "", {"qk_layernorm": True}),
        (
            {"qk_layernorm": True, "qk_layernorm_scope": "all"},
            "qk_layernorm_scope",
            "all needs normalization RMSNorm",
            {"normalization": "RMSNorm"},
        ),
        ({"v_head_dim": 4}, "v_head_dim", "needs multi_latent_attention", LATENT),
        ({"latent_norm_epsilon": 1e-6}, "latent_norm_epsilon", "needs multi_latent_attention", LATENT),
        ({**LATENT, "kv_lora_rank": None}, "kv_lora_rank", "multi_latent_attention needs it", {"kv_lora_rank": 8}),
        ({**LATENT, "qk_pos_emb_head_dim": 3}, "qk_pos_emb_head_dim", "use 4", {"qk_pos_emb_head_dim": 4}),
        ({**LATENT, "num_query_groups": 2}, "num_query_groups", "leave it out", {"num_query_groups": None}),
        ({**LATENT, "kv_channels": 4}, "kv_channels", "set model.qk_head_dim", {"kv_channels": None}),
        ({**LATENT, "rotary_percent": 0.5}, "rotary_percent", "qk_pos_emb_head_dim", {"rotary_percent": 1.0}),
        ({**LATENT, "add_qkv_bias": True}, "add_qkv_bias", "leave it out", {"add_qkv_bias": False}),
        (
            {**LATENT, "position_embedding_type": "none"},
            "position_embedding_type",
            "none does not fit multi_latent_attention",
            ROPE,
        ),
    ],
)
def test_refused_combination(model: dict[str, Any], key: str, said: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(model)
    assert caught.value.key == f"model.{key}"
    assert said in caught.value.problem
    config({**model, **change})
