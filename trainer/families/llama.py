"""Llama 1 to 3, and what later families share with it. Torch-free.

Touvron et al. 2023 (arXiv:2302.13971), section 2.2; names: transformers models/llama/modeling_llama.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import SeparateHeads, Stacked
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope, write_rope

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


SILU = ("silu", "swish")
"""Two names of one activation."""

ABSENT: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": None,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Meaning of a file of Llama without these keys. Later families change some."""


def read_shape(hub: HubConfig) -> dict[str, Any]:
    """Keys of a decoder with RMSNorm, SwiGLU and no biases, without rotary positions."""
    heads, hidden = hub.need("num_attention_heads"), hub.need("hidden_size")
    return {
        "num_layers": hub.need("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": hub.take("num_key_value_heads", null=heads),
        "kv_channels": hub.take("head_dim", null=hidden // heads),
        "ffn_hidden_size": hub.need("intermediate_size"),
        "max_position_embeddings": hub.take("max_position_embeddings"),
        "vocab_size": hub.need("vocab_size"),
        "normalization": "RMSNorm",
        "norm_epsilon": hub.take("rms_norm_eps"),
        "swiglu": True,
        "disable_bias_linear": True,
        "attention_dropout": hub.take("attention_dropout"),
        "hidden_dropout": 0.0,
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
    }


def write_shape(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """Keys of config.json that read_shape reads."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "max_position_embeddings": max_positions,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **write_rope(model),
    }


def ends(model: ModelConfig) -> Iterator[Weight]:
    """Embedding, final norm and head."""
    yield weight("embedding.word.weight", "model.embed_tokens.weight")
    yield weight("final_norm.weight", "model.norm.weight")
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")


def attention(model: ModelConfig, layer: int) -> Iterator[Weight]:
    """Queries, keys, values, output product, and norms of queries and keys if there are any."""
    ours, theirs = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
    queries = model.num_attention_heads // model.query_groups
    heads = SeparateHeads(model.query_groups, queries, model.head_dim)
    for what in ("weight", "bias") if model.has_qkv_bias else ("weight",):
        yield weight(f"{ours}.qkv.{what}", *(f"{theirs}.{part}_proj.{what}" for part in "qkv"), form=heads)
    yield from affine(f"{ours}.projection", f"{theirs}.o_proj", has_bias=model.has_attention_output_bias)
    if model.qk_layernorm:
        yield weight(f"{ours}.q_norm.weight", f"{theirs}.q_norm.weight")
        yield weight(f"{ours}.k_norm.weight", f"{theirs}.k_norm.weight")


def mlp(layer: int, *, has_bias: bool = False) -> Iterator[Weight]:
    """Gate and up as one tensor, and down."""
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    for what in ("weight", "bias") if has_bias else ("weight",):
        yield weight(f"{ours}.fc1.{what}", f"{theirs}.gate_proj.{what}", f"{theirs}.up_proj.{what}", form=Stacked())
    yield from affine(f"{ours}.fc2", f"{theirs}.down_proj", has_bias=has_bias)


def norms(layer: int) -> Iterator[Weight]:
    """The norms before attention and before the feed-forward part."""
    theirs = f"model.layers.{layer}"
    yield weight(f"layers.{layer}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
    yield weight(f"layers.{layer}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")


def dense_weights(model: ModelConfig) -> Iterator[Weight]:
    """All tensors of a model whose layers are those of Llama."""
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from norms(layer)
        yield from attention(model, layer)
        yield from mlp(layer, has_bias=not model.disable_bias_linear)


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("mlp_bias", False)
    hub.only("rope_interleaved", False)
    biased = hub.take("attention_bias")
    return {**read_shape(hub), **read_rope(hub), "add_qkv_bias": biased, "add_attention_output_bias": biased}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    biased = model.has_qkv_bias
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "silu",
        "attention_bias": biased,
        "mlp_bias": False,
    }


TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

LLAMA = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={
        **TINY,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    absent=ABSENT,
    without_effect={
        "is_llama_config": "is written by nanotron, the program that trained SmolLM",
        "max_sequence_length": "is not read by the class of transformers, which reads max_position_embeddings",
    },
    other_architectures=("LLaMAForCausalLM",),
)

# transformers computes it by the class of Llama.
INTERNLM3 = replace(
    LLAMA,
    name="InternLM3",
    model_type="internlm3",
    other_architectures=("InternLM3ForCausalLM",),
    absent={
        **ABSENT,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "vocab_size": 128512,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
