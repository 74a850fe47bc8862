"""OPT; the sizes 125M and up, and 350M, which norms after the residual add and has a narrow word table. Torch-free.

Zhang et al. 2022 (arXiv:2205.01068), section 2; names: transformers models/opt/modeling_opt.py. Position p reads row
p + 2 of the position table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import SeparateHeads
from trainer.families.format.hub_config import HubConfig
from trainer.families.gpt2 import activation_name, read_activation

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_POSITION_OFFSET = 2


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("layerdrop", 0.0)
    hub.only("enable_bias", True)
    hub.only("layer_norm_elementwise_affine", True)
    hidden, norms_before = hub.need("hidden_size"), hub.take("do_layer_norm_before")
    narrow = hub.take("word_embed_proj_dim", null=hidden)
    has_final_norm = not hub.take("_remove_final_layer_norm")
    return {
        "num_layers": hub.need("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": hub.need("num_attention_heads"),
        "ffn_hidden_size": hub.need("ffn_dim"),
        "max_position_embeddings": hub.take("max_position_embeddings"),
        "position_embedding_offset": _POSITION_OFFSET,
        "vocab_size": hub.need("vocab_size"),
        "embedding_size": None if narrow == hidden else narrow,
        "norm_placement": "pre" if norms_before else "post",
        "has_final_norm": norms_before and has_final_norm,
        "activation_func": read_activation(hub, "activation_function"),
        "attention_dropout": hub.take("attention_dropout"),
        "hidden_dropout": hub.take("dropout"),
        "init_method_std": hub.take("init_std"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "ffn_dim": model.ffn_size,
        "max_position_embeddings": max_positions,
        "word_embed_proj_dim": model.embedding_size or model.hidden_size,
        "do_layer_norm_before": model.norm_placement == "pre",
        "_remove_final_layer_norm": model.norm_placement == "pre" and not model.has_final_norm,
        "activation_function": activation_name(model),
        "attention_dropout": model.attention_dropout,
        "dropout": model.hidden_dropout,
        "init_std": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    theirs = "model.decoder"
    yield weight("embedding.word.weight", f"{theirs}.embed_tokens.weight")
    yield weight("embedding.position.weight", f"{theirs}.embed_positions.weight")
    if model.embedding_size is not None:
        yield weight("embedding.project.weight", f"{theirs}.project_in.weight")
        yield weight("head.project.weight", f"{theirs}.project_out.weight")
    if model.has_final_norm:
        yield from affine("final_norm", f"{theirs}.final_layer_norm", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")
    for layer in range(model.num_layers):
        yield from _layer(model, f"layers.{layer}", f"{theirs}.layers.{layer}")


def _layer(model: ModelConfig, ours: str, theirs: str) -> Iterator[Weight]:
    heads = SeparateHeads(model.query_groups, 1, model.head_dim)
    for what in ("weight", "bias"):
        parts = (f"{theirs}.self_attn.{part}_proj.{what}" for part in "qkv")
        yield weight(f"{ours}.attention.qkv.{what}", *parts, form=heads)
    pairs = {
        "attention.projection": "self_attn.out_proj",
        "attention_norm": "self_attn_layer_norm",
        "mlp.fc1": "fc1",
        "mlp.fc2": "fc2",
        "mlp_norm": "final_layer_norm",
    }
    for mine, other in pairs.items():
        yield from affine(f"{ours}.{mine}", f"{theirs}.{other}", has_bias=True)


OPT = Family(
    name="OPT",
    model_type="opt",
    architecture="OPTForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "ffn_dim": 48,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
    absent={
        "ffn_dim": 3072,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "vocab_size": 50272,
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "enable_bias": True,
        "init_std": 0.02,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "word_embed_proj_dim": None,
    },
    without_effect=dict.fromkeys(
        ("activation_dropout", "learned_embeddings", "scale_embeddings"), "is not read by the class of transformers"
    ),
)
