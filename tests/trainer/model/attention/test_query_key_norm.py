"""Norm of queries and keys before rope against the attention layers of transformers."""

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
    unpacked,
)
from trainer.config.sections.model import ModelConfig
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.rotary import RotaryTable

pytest.importorskip("transformers")

HUB = {"hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "head_dim": 6}


def hub_names(tensors: Tensors, model: ModelConfig) -> Tensors:
    """Weights, or their gradients, under the names of transformers."""
    named = {}
    for name, tensor in tensors.items():
        if name.startswith("qkv."):
            kinds = (f"{part}_proj.{name.removeprefix('qkv.')}" for part in "qkv")
            named.update(zip(kinds, unpacked(tensor, model), strict=True))
        else:
            named[name.replace("projection", "o_proj")] = tensor
    return named


def compare(model: ModelConfig, hub: torch.nn.Module, rotary: torch.nn.Module, **options: Any) -> None:
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    angles = rotary(torch.zeros(1), positions, **options)
    table = RotaryTable.build(LENGTH, model.head_dim, model.rotary_base, torch.float32, CPU)
    weights, found = our_layer(model, SelfAttention, table)
    check_equal(hub_names(found, model), hub_layer(hub, angles, hub_names(weights, model)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [8, 2])
def test_each_head_equals_qwen3(groups: int, bias: bool) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    hub = qwen3.Qwen3Config(**HUB, num_key_value_heads=groups, attention_bias=bias, attn_implementation="eager")
    model = model_config(kv_channels=6, num_query_groups=groups, qk_layernorm=True, disable_bias_linear=not bias)
    compare(model, qwen3.Qwen3Attention(hub, 0), qwen3.Qwen3RotaryEmbedding(hub))


def test_one_plus_weight_equals_gemma3() -> None:
    from transformers.models.gemma3 import modeling_gemma3 as gemma3

    hub = gemma3.Gemma3TextConfig(
        **HUB,
        num_key_value_heads=2,
        query_pre_attn_scalar=6,
        layer_types=["full_attention"],
        attn_implementation="eager",
    )
    model = model_config(kv_channels=6, num_query_groups=2, qk_layernorm=True, apply_layernorm_1p=True, rotary_base=1e6)
    rotary = gemma3.Gemma3RotaryEmbedding(hub)
    compare(model, gemma3.Gemma3Attention(hub, 0), rotary, layer_type="full_attention")


@pytest.mark.parametrize("groups", [8, 2])
def test_all_heads_equal_olmo2(groups: int) -> None:
    from transformers.models.olmo2 import modeling_olmo2 as olmo2

    hub = olmo2.Olmo2Config(**HUB, num_key_value_heads=groups, attn_implementation="eager")
    model = model_config(kv_channels=6, num_query_groups=groups, qk_layernorm=True, qk_layernorm_scope="all")
    compare(model, olmo2.Olmo2Attention(hub, 0), olmo2.Olmo2RotaryEmbedding(hub))


def test_layer_norm_of_each_head_has_a_bias() -> None:
    model = model_config(normalization="LayerNorm", qk_layernorm=True)
    weights, _ = our_layer(model, SelfAttention, None)
    assert {name for name in weights if "norm" in name} == {
        f"{part}_norm.{kind}" for part in "qk" for kind in ("weight", "bias")
    }


def test_the_output_bias_alone() -> None:
    model = model_config(add_attention_output_bias=True)
    weights, _ = our_layer(model, SelfAttention, None)
    assert {name for name in weights if name.endswith("bias")} == {"projection.bias"}
