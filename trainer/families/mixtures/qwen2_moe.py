"""Qwen1.5-MoE and Qwen2-MoE: experts beside a shared expert with a gate. Torch-free.

Yang et al. 2024 (arXiv:2407.10671), section 2.2.2; names: as in the published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.experts import experts, layer_pattern
from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import Stacked
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_switched_windows, write_windows
from trainer.families.llama import SILU, TINY, attention, ends, mlp, norms, read_shape, write_shape
from trainer.families.qwen2 import ABSENT

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    shape = read_shape(hub)
    layers, last = range(shape["num_layers"]), hub.take("max_window_layers")
    step, dense = hub.take("decoder_sparse_step"), hub.take("mlp_only_layers", null=[])
    return {
        **shape,
        **read_rope(hub),
        **read_switched_windows(hub, len(layers), [layer % 2 == 0 and layer < last for layer in layers]),
        "add_qkv_bias": hub.take("qkv_bias"),
        "num_experts": hub.take("num_experts"),
        "moe_layer_freq": layer_pattern([layer not in dense and (layer + 1) % step == 0 for layer in layers]),
        "moe_ffn_hidden_size": hub.take("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": hub.take("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
        "moe_router_topk": hub.take("num_experts_per_tok"),
        "moe_router_pre_softmax": not hub.take("norm_topk_prob"),
        "moe_aux_loss_coeff": hub.take("router_aux_loss_coef"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        **write_windows(model),
        "use_sliding_window": model.window_size is not None,
        "hidden_act": "silu",
        "qkv_bias": model.has_qkv_bias,
        "num_experts": model.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.is_moe_layer(layer)],
        "moe_intermediate_size": model.expert_ffn_size,
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
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
            yield from _experts(model, layer)
        else:
            yield from mlp(layer)


def _experts(model: ModelConfig, layer: int) -> Iterator[Weight]:
    ours, theirs = f"layers.{layer}.moe", f"model.layers.{layer}.mlp"
    yield from experts(model, layer, theirs, "gate_proj", "up_proj", "down_proj")
    first = (f"{theirs}.shared_expert.{part}_proj.weight" for part in ("gate", "up"))
    yield weight(f"{ours}.shared_expert.fc1.weight", *first, form=Stacked())
    yield from affine(f"{ours}.shared_expert.fc2", f"{theirs}.shared_expert.down_proj", has_bias=False)
    yield from affine(f"{ours}.shared_expert_gate", f"{theirs}.shared_expert_gate", has_bias=False)


QWEN2_MOE = Family(
    name="Qwen2-MoE",
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        **TINY,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [2],
    },
    absent={
        **ABSENT,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
    },
)
