"""GLM-4 of 2024 (glm) and of 2025 (glm4): half of each head rotates, in neighbouring channels. Torch-free.

GLM Team 2024 (arXiv:2406.12793), section 2; names: transformers models/glm and models/glm4. The later one has norms on
the results of sublayers too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import Joined
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, attention, ends, norms, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_ABSENT: Mapping[str, Any] = {
    **ABSENT,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "vocab_size": 151552,
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    return {
        **read_shape(hub),
        **read_rope(hub, percent_key="partial_rotary_factor"),
        "rotary_interleaved": True,
        "add_qkv_bias": hub.take("attention_bias"),
    }


def _read_sandwich(hub: HubConfig) -> dict[str, Any]:
    return {**_read(hub), "norm_placement": "sandwich"}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    shape = write_shape(model, vocab_size, max_positions)
    shape["rope_parameters"]["partial_rotary_factor"] = model.rotary_percent
    return {
        **shape,
        "partial_rotary_factor": model.rotary_percent,
        "hidden_act": "silu",
        "attention_bias": model.has_qkv_bias,
    }


def _sublayers(model: ModelConfig, layer: int) -> Iterator[Weight]:
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    yield from attention(model, layer)
    yield weight(f"{ours}.fc1.weight", f"{theirs}.gate_up_proj.weight", form=Joined())
    yield from affine(f"{ours}.fc2", f"{theirs}.down_proj", has_bias=False)


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from norms(layer)
        yield from _sublayers(model, layer)


def _sandwich_weights(model: ModelConfig) -> Iterator[Weight]:
    yield from _weights(model)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield weight(f"{ours}.attention_output_norm.weight", f"{theirs}.post_self_attn_layernorm.weight")
        yield weight(f"{ours}.mlp_output_norm.weight", f"{theirs}.post_mlp_layernorm.weight")


_TINY = {**TINY, "head_dim": 8}

GLM = Family(
    name="GLM-4 (glm)",
    model_type="glm",
    architecture="GlmForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny=_TINY,
    absent=_ABSENT,
)

GLM4 = Family(
    name="GLM-4 (glm4)",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    read_config=_read_sandwich,
    write_config=_write,
    weights=_sandwich_weights,
    tiny=_TINY,
    absent=_ABSENT,
)
