"""Qwen3-MoE: Qwen3 with experts in some or all layers. Torch-free.

Yang et al. 2025 (arXiv:2505.09388), section 2; names: as in the published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.experts import experts, layer_pattern
from trainer.families.format.family import Family, Weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.llama import ABSENT, TINY, attention, ends, mlp, norms
from trainer.families.qwen3 import read, write

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    shape = read(hub)
    step, dense = hub.take("decoder_sparse_step"), hub.take("mlp_only_layers", null=[])
    if not all(isinstance(layer, int) and 0 <= layer < hub.need("num_hidden_layers") for layer in dense):
        hub.refuse(f"mlp_only_layers is {dense!r}; use numbers of layers, from 0")
    # Every layer has the window in transformers, whatever max_window_layers and layer_types say.
    window = hub.take("sliding_window", null=None)
    window = window if hub.take("use_sliding_window") else None
    layers = range(shape["num_layers"])
    return {
        **shape,
        **({} if window is None else {"window_size": window}),
        "num_experts": hub.take("num_local_experts"),
        "moe_layer_freq": layer_pattern([layer not in dense and (layer + 1) % step == 0 for layer in layers]),
        "moe_ffn_hidden_size": hub.take("moe_intermediate_size"),
        "moe_router_topk": hub.take("num_experts_per_tok"),
        "moe_router_pre_softmax": not hub.take("norm_topk_prob"),
        "moe_aux_loss_coeff": hub.take("router_aux_loss_coef"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    dense = [layer for layer in range(model.num_layers) if not model.is_moe_layer(layer)]
    window = model.window_size if model.window_layers == "all" else None
    return {
        **write(model, vocab_size, max_positions),
        "sliding_window": window,
        "use_sliding_window": window is not None,
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
    absent={
        **ABSENT,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 32768,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    without_effect=dict.fromkeys(
        (
            *("layer_types", "max_window_layers", "moe_layer_freq", "qkv_bias", "shared_expert_intermediate_size"),
            "use_qk_norm",
        ),
        "is not read by the class of transformers; the tensors would show another model",
    ),
    aliases={"num_experts": "num_local_experts"},
)
