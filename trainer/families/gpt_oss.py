"""gpt-oss: biases everywhere, sinks, windows in every second layer, limited gates. Torch-free.

OpenAI 2025 (arXiv:2508.10925), section 2; names: transformers models/gpt_oss/modeling_gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import ExpertMatrices
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_windows, write_windows
from trainer.families.llama import ABSENT, SILU, TINY, attention, ends, norms, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("attention_bias", True)
    shape = read_shape(hub)
    layers = shape["num_layers"]
    return {
        **shape,
        **read_rope(hub, unscaled=_YARN),
        **read_windows(hub, layers, [layer % 2 == 0 for layer in range(layers)]),
        "disable_bias_linear": False,
        "attention_sinks": True,
        "activation_clamp": hub.take("swiglu_limit"),
        "activation_alpha": hub.take("swiglu_alpha"),
        "num_experts": hub.take("num_local_experts"),
        "moe_router_topk": hub.take("num_experts_per_tok"),
        "moe_router_bias": True,
        "moe_aux_loss_coeff": hub.take("router_aux_loss_coef"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        **write_windows(model),
        "intermediate_size": model.expert_ffn_size,
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_limit": model.activation_clamp,
        "swiglu_alpha": model.activation_alpha,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield from norms(layer)
        yield from attention(model, layer)
        yield weight(f"{ours}.attention.sinks", f"{theirs}.self_attn.sinks")
        yield from affine(f"{ours}.moe.router", f"{theirs}.mlp.router", has_bias=True)
        for what, suffix in (("weight", ""), ("bias", "_bias")):
            for fc, name, gated in (("fc1", "gate_up_proj", True), ("fc2", "down_proj", False)):
                form = ExpertMatrices(gated=gated)
                yield weight(f"{ours}.moe.experts.{fc}.{what}", f"{theirs}.mlp.experts.{name}{suffix}", form=form)


GPT_OSS = Family(
    name="gpt-oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        **TINY,
        "head_dim": 8,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {**_YARN, "rope_theta": 500.0, "original_max_position_embeddings": 16, "factor": 4.0},
    },
    absent={
        **ABSENT,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_hidden_layers": 36,
        "vocab_size": 201088,
        "attention_bias": True,
        "head_dim": 64,
        "layer_types": None,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    without_effect=dict.fromkeys(
        ("initial_context_length", "rope_ntk_alpha", "rope_ntk_beta", "rope_scaling_factor"),
        "is read by OpenAI's own code alone; rope_scaling says the same",
    ),
    aliases={"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"},
)
