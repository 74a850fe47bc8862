"""BLOOM: a norm of the word embedding, and ALiBi in the place of positions. Torch-free.

BigScience Workshop 2022 (arXiv:2211.05100), section 3.2; names: transformers models/bloom/modeling_bloom.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import JoinedHeads
from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("apply_residual_connection_post_layernorm", False)
    hidden = hub.need("hidden_size")
    hub.only("n_inner", None, 4 * hidden)
    return {
        "num_layers": hub.need("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": hub.need("n_head"),
        "ffn_hidden_size": 4 * hidden,
        # The length of the training: the model has no table of positions.
        "max_position_embeddings": hub.take("seq_length"),
        "position_embedding_type": "alibi",
        "embedding_layer_norm": True,
        "vocab_size": hub.need("vocab_size"),
        "norm_epsilon": hub.take("layer_norm_epsilon"),
        "activation_func": "gelu_tanh",
        "attention_dropout": hub.take("attention_dropout"),
        "hidden_dropout": hub.take("hidden_dropout"),
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "seq_length": max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield weight("embedding.word.weight", "transformer.word_embeddings.weight")
    yield from affine("embedding.word_norm", "transformer.word_embeddings_layernorm", has_bias=True)
    yield from affine("final_norm", "transformer.ln_f", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")
    heads = JoinedHeads(model.query_groups, 1, model.head_dim, by_head=True)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        attention = f"{theirs}.self_attention"
        yield from affine(f"{ours}.attention_norm", f"{theirs}.input_layernorm", has_bias=True)
        yield from affine(f"{ours}.attention.qkv", f"{attention}.query_key_value", has_bias=True, form=heads)
        yield from affine(f"{ours}.attention.projection", f"{attention}.dense", has_bias=True)
        yield from affine(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", has_bias=True)
        yield from affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.dense_h_to_4h", has_bias=True)
        yield from affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.dense_4h_to_h", has_bias=True)


BLOOM = Family(
    name="BLOOM",
    model_type="bloom",
    architecture="BloomForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={"vocab_size": 101, "hidden_size": 48, "n_layer": 4, "n_head": 6, "seq_length": 64},
    base_prefix="transformer.",
    without_effect={
        **dict.fromkeys(
            ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "slow_but_exact"),
            "chooses a way to compute the same numbers",
        ),
        **dict.fromkeys(
            ("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
            "is of the first code for BLOOM, and not read by the class of transformers",
        ),
    },
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    absent={
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "vocab_size": 250880,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "seq_length": 2048,
        "tie_word_embeddings": True,
    },
)
