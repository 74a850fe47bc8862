"""Mixtral: Mistral with eight experts in every layer, of which two process a token. Torch-free.

Jiang et al. 2024 (arXiv:2401.04088), section 2; names: those of the published files, such as
``block_sparse_moe.experts.0.w1``.
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
    hub.only("router_jitter_noise", 0.0)
    window = hub.take("sliding_window", null=None)
    return {
        **read_shape(hub),
        **read_rope(hub),
        **({"window_size": window} if window is not None else {}),
        "num_experts": hub.take("num_local_experts"),
        "moe_router_topk": hub.take("num_experts_per_tok"),
        "moe_aux_loss_coeff": hub.take("router_aux_loss_coef"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "intermediate_size": model.expert_ffn_size,
        "hidden_act": "silu",
        "sliding_window": model.window_size if model.window_layers == "all" else None,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
        "router_jitter_noise": 0.0,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from norms(layer)
        yield from attention(model, layer)
        yield from experts(model, layer, f"model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2")


MIXTRAL = Family(
    name="Mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    absent={
        **ABSENT,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    },
    aliases={"num_experts": "num_local_experts"},
)
