"""Phi 1 to 2: one norm for attention and feed-forward part, a head with a bias. Torch-free.

Li et al. 2023 (arXiv:2309.05463), section 2.1; names: transformers models/phi/modeling_phi.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import SeparateHeads
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope, write_rope
from trainer.families.gpt2 import activation_name, dropout_notes, read_activation

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("qk_layernorm", False)
    heads = hub.need("num_attention_heads")
    return {
        "num_layers": hub.need("num_hidden_layers"),
        "hidden_size": hub.need("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": hub.take("num_key_value_heads", null=heads),
        "ffn_hidden_size": hub.need("intermediate_size"),
        "max_position_embeddings": hub.take("max_position_embeddings"),
        "vocab_size": hub.need("vocab_size"),
        "norm_epsilon": hub.take("layer_norm_eps"),
        "activation_func": read_activation(hub, "hidden_act"),
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "add_head_bias": True,
        "attention_dropout": hub.take("attention_dropout"),
        "hidden_dropout": hub.take("resid_pdrop"),
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
        **read_rope(hub, percent_key="partial_rotary_factor"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": max_positions,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": activation_name(model),
        "qk_layernorm": False,
        "attention_dropout": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **write_rope(model),
        "partial_rotary_factor": model.rotary_percent,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield weight("embedding.word.weight", "model.embed_tokens.weight")
    yield from affine("final_norm", "model.final_layernorm", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")
    yield weight("head.bias", "lm_head.bias")
    heads = SeparateHeads(model.query_groups, model.num_attention_heads // model.query_groups, model.head_dim)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for what in ("weight", "bias"):
            parts = (f"{theirs}.self_attn.{part}_proj.{what}" for part in "qkv")
            yield weight(f"{ours}.attention.qkv.{what}", *parts, form=heads)
        yield from affine(f"{ours}.attention_norm", f"{theirs}.input_layernorm", has_bias=True)
        yield from affine(f"{ours}.attention.projection", f"{theirs}.self_attn.dense", has_bias=True)
        yield from affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.fc1", has_bias=True)
        yield from affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.fc2", has_bias=True)


PHI = Family(
    name="Phi",
    model_type="phi",
    architecture="PhiForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    },
    notes=dropout_notes,
    absent={
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "vocab_size": 51200,
        "attention_dropout": 0.0,
        "hidden_act": "gelu_new",
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "resid_pdrop": 0.0,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    without_effect={
        "attention_bias": "is not read by the class of transformers: all products have biases",
        "embd_pdrop": "is a rate of dropout, which a note tells",
        "rotary_dim": "is read by Microsoft's own code; partial_rotary_factor says the same",
    },
)
