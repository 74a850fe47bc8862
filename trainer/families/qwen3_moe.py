"""Qwen3-MoE: Qwen3 with experts in some or all layers. Torch-free.

Yang et al. 2025 (arXiv:2505.09388), section 2; names: as in the published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.experts import experts, layer_pattern
from trainer.families.format.family import Family, Weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.llama import TINY, attention, ends, mlp, norms
from trainer.families.qwen3 import read, write

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    shape = read(hub)
    step, dense = hub.take("decoder_sparse_step", 1), set(hub.take("mlp_only_layers", []))
    layers = range(shape["num_layers"])
    return {
        **shape,
        "num_experts": hub.take("num_local_experts", hub.take("num_experts", 128)),
        "moe_layer_freq": layer_pattern([layer not in dense and (layer + 1) % step == 0 for layer in layers]),
        "moe_ffn_hidden_size": hub.take("moe_intermediate_size", 768),
        "moe_router_topk": hub.take("num_experts_per_tok", 8),
        "moe_router_pre_softmax": not hub.take("norm_topk_prob", False),
        "moe_aux_loss_coeff": hub.take("router_aux_loss_coef", 0.001),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    dense = [layer for layer in range(model.num_layers) if not model.is_moe_layer(layer)]
    return {
        **write(model, vocab_size, max_positions),
        "num_experts": model.num_experts,
        "num_local_experts": model.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "moe_intermediate_size": model.expert_ffn_size,
        "num_experts_per_tok": model.moe_router_topk,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from norms(layer)
        yield from attention(model, layer)
        if model.is_moe_layer(layer):
            theirs = f"model.layers.{layer}.mlp"
            yield from experts(model, layer, theirs, "gate_proj", "up_proj", "down_proj")
        else:
            yield from mlp(layer)


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        **TINY,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
)
