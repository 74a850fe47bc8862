"""Multi-head latent attention against transformers' DeepseekV3Attention, and divided over tp against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.model.attention.hub_attention import (
    BATCH,
    CPU,
    LENGTH,
    Tensors,
    check_equal,
    hub_layer,
    model_config,
    our_layer,
)
from trainer.model.attention.latent_attention import LatentAttention
from trainer.model.rotary import RotaryTable

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 7,
    "norm_epsilon": 1e-6,
    "rotary_interleaved": True,
}
HUB_NAMES = {
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_norm": "kv_a_layernorm",
    "key_value_up": "kv_b_proj",
    "projection": "o_proj",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}


def hub_names(tensors: Tensors) -> Tensors:
    """Weights, or their gradients, under the names of transformers."""
    named = {}
    for name, tensor in tensors.items():
        part, dot, kind = name.partition(".")
        named[HUB_NAMES[part] + dot + kind if dot else name] = tensor
    return named


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"q_lora_rank": None}, None),
        ({"rotary_interleaved": False}, None),
        ({"v_head_dim": 13}, None),
        ({"norm_epsilon": 0.1, "latent_norm_epsilon": 1e-6}, None),
        ({}, YARN),
        ({}, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
        ({}, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    ],
)
def test_equals_deepseek_v3(keys: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    model = model_config(**{**LATENT, **keys}, rope_scaling=scaling)
    hub = deepseek.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=1,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_head_dim,
        qk_rope_head_dim=model.qk_pos_emb_head_dim,
        v_head_dim=model.v_head_dim,
        max_position_embeddings=LENGTH,
        rope_interleave=model.rotary_interleaved,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default", **(scaling or {})},
        attn_implementation="eager",
    )
    angles = deepseek.DeepseekV3RotaryEmbedding(hub)(torch.zeros(1), torch.arange(LENGTH).expand(BATCH, -1))
    table = RotaryTable.of(model, LENGTH, torch.float32, CPU)
    weights, found = our_layer(model, LatentAttention, table)
    expected = hub_layer(deepseek.DeepseekV3Attention(hub, 0), angles, hub_names(weights))
    check_equal(hub_names(found), expected)


def test_a_given_scale_replaces_the_computed_one() -> None:
    scaling = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    table = RotaryTable.of(model_config(**LATENT), LENGTH, torch.float32, CPU)
    plain, given = (
        our_layer(model_config(**LATENT, **keys), LatentAttention, table)[1]["output"]
        for keys in ({}, {"softmax_scale": 10**-0.5, "rope_scaling": scaling})
    )
    torch.testing.assert_close(given, plain)


def test_the_output_bias_is_the_only_one() -> None:
    model = model_config(**LATENT, add_attention_output_bias=True)
    table = RotaryTable.of(model, LENGTH, torch.float32, CPU)
    weights, _ = our_layer(model, LatentAttention, table)
    assert [name for name in weights if name.endswith("bias")] == ["projection.bias"]
