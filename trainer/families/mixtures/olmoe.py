"""OLMoE: experts in every layer, and norms over all queries and keys. Torch-free.

Muennighoff et al. 2024 (arXiv:2409.02060), section 2; names: as in the published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.experts import experts
from trainer.families.format.family import Family, Weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, attention, ends, norms, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("clip_qkv", None)
    biased = hub.take("attention_bias")
    return {
        **read_shape(hub),
        **read_rope(hub),
        "qk_layernorm": True,
        "qk_layernorm_scope": "all",
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
        "num_experts": hub.take("num_experts"),
        "moe_router_topk": hub.take("num_experts_per_tok"),
        "moe_router_pre_softmax": not hub.take("norm_topk_prob"),
        "moe_aux_loss_coeff": hub.take("router_aux_loss_coef"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "intermediate_size": model.expert_ffn_size,
        "hidden_act": "silu",
        "attention_bias": model.has_qkv_bias,
        "clip_qkv": None,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from norms(layer)
        yield from attention(model, layer)
        yield from experts(model, layer, f"model.layers.{layer}.mlp", "gate_proj", "up_proj", "down_proj")


OLMOE = Family(
    name="OLMoE",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={**TINY, "num_experts": 4, "num_experts_per_tok": 2},
    absent={
        **ABSENT,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "vocab_size": 50304,
        "clip_qkv": None,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.01,
    },
    aliases={"num_local_experts": "num_experts"},
)
