"""GPT-NeoX and Pythia: attention and feed-forward part in parallel. Torch-free.

Black et al. 2022 (arXiv:2204.06745), section 2.1; names: transformers models/gpt_neox/modeling_gpt_neox.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import JoinedHeads
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope, write_rope
from trainer.families.gpt2 import activation_name, read_activation

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("attention_bias", True)
    rope = read_rope(hub, base_key="rotary_emb_base", percent_key="rotary_pct")
    # transformers does not read these names in this family; an export has them for other readers.
    hub.only("rope_theta", rope["rotary_base"])
    hub.only("partial_rotary_factor", rope["rotary_percent"])
    parallel = hub.take("use_parallel_residual")
    return {
        "num_layers": hub.need("num_hidden_layers"),
        "hidden_size": hub.need("hidden_size"),
        "num_attention_heads": hub.need("num_attention_heads"),
        "ffn_hidden_size": hub.need("intermediate_size"),
        "max_position_embeddings": hub.take("max_position_embeddings"),
        "vocab_size": hub.need("vocab_size"),
        "norm_epsilon": hub.take("layer_norm_eps"),
        "activation_func": read_activation(hub, "hidden_act"),
        "parallel_residual": parallel,
        "attention_dropout": hub.take("attention_dropout"),
        "hidden_dropout": hub.take("hidden_dropout"),
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
        **rope,
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": max_positions,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": activation_name(model),
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **write_rope(model),
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield weight("embedding.word.weight", "gpt_neox.embed_in.weight")
    yield from affine("final_norm", "gpt_neox.final_layer_norm", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "embed_out.weight")
    heads = JoinedHeads(model.query_groups, 1, model.head_dim, by_head=True)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"gpt_neox.layers.{layer}"
        yield from affine(f"{ours}.attention_norm", f"{theirs}.input_layernorm", has_bias=True)
        qkv = f"{theirs}.attention.query_key_value"
        yield from affine(f"{ours}.attention.qkv", qkv, has_bias=True, form=heads)
        yield from affine(f"{ours}.attention.projection", f"{theirs}.attention.dense", has_bias=True)
        yield from affine(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", has_bias=True)
        yield from affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.dense_h_to_4h", has_bias=True)
        yield from affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.dense_4h_to_h", has_bias=True)


GPT_NEOX = Family(
    name="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
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
        "rotary_pct": 0.5,
    },
    base_prefix="gpt_neox.",
    word_table_copies=("embed_out.weight",),
    without_effect=dict.fromkeys(
        ("attention_probs_dropout_prob", "hidden_dropout_prob"),
        "is not read by the class of transformers, which reads attention_dropout and hidden_dropout",
    ),
    absent={
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "vocab_size": 50432,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
    },
    ignored_tensors=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
