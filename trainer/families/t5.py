"""T5 v1.1 and the first T5. Torch-free.

Raffel et al. 2020 (arXiv:1910.10683), section 2.1; names: transformers models/t5/modeling_t5.py. A config.json with
``tie_word_embeddings: false`` is of v1.1: it has an output table of its own, and no factor on the decoder's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, weight
from trainer.families.format.forms import Stacked
from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

FEED_FORWARD = {
    "gated-gelu": ("gelu_tanh", True),
    "gated-gelu_new": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "relu": ("relu", False),
    "gelu_new": ("gelu_tanh", False),
    "gelu": ("gelu", False),
}
"""``feed_forward_proj`` -> our activation, and True for gates; an export takes the first name of each."""


def _read(hub: HubConfig) -> dict[str, Any]:
    activation, is_gated = FEED_FORWARD[hub.only("feed_forward_proj", *FEED_FORWARD)]
    hub.only("is_decoder", False)
    hub.only("is_encoder_decoder", True)
    is_tied = hub.take("tie_word_embeddings", null=True)
    dropout = hub.take("dropout_rate")
    layers = hub.need("num_layers")
    return {
        "architecture": "t5",
        "num_layers": layers,
        "decoder_num_layers": hub.take("num_decoder_layers", null=layers),
        "hidden_size": hub.need("d_model"),
        "num_attention_heads": hub.need("num_heads"),
        "kv_channels": hub.need("d_kv"),
        "ffn_hidden_size": hub.need("d_ff"),
        "vocab_size": hub.need("vocab_size"),
        "max_position_embeddings": hub.take("n_positions"),
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": hub.take("relative_attention_num_buckets"),
        "relative_attention_max_distance": hub.take("relative_attention_max_distance"),
        "softmax_scale": 1.0,
        "normalization": "RMSNorm",
        "norm_epsilon": hub.take("layer_norm_epsilon"),
        "activation_func": activation,
        "gated_linear_unit": is_gated,
        "disable_bias_linear": True,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        # transformers 5 writes tie_word_embeddings: true for every T5, and says by the other key which one it is.
        "untie_embeddings_and_output_weights": not hub.take("scale_decoder_outputs", null=is_tied),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    is_tied = not model.untie_embeddings_and_output_weights
    form = (model.activation, model.is_gated)
    return {
        "vocab_size": vocab_size,
        "n_positions": max_positions,
        "d_model": model.hidden_size,
        "d_kv": model.head_dim,
        "d_ff": model.ffn_size,
        "num_layers": model.num_layers,
        "num_decoder_layers": model.num_decoder_layers,
        "num_heads": model.num_attention_heads,
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "dropout_rate": model.hidden_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "feed_forward_proj": next((name for name, ours in FEED_FORWARD.items() if ours == form), ""),
        "is_encoder_decoder": True,
        "tie_word_embeddings": is_tied,
        "scale_decoder_outputs": is_tied,
    }


def _token_ids(keys: Mapping[str, Any]) -> dict[str, int]:
    """Padding, 0 in every published T5, is also the token that the decoder begins with."""
    pad = keys.get("pad_token_id")
    pad = 0 if pad is None else pad
    start = keys.get("decoder_start_token_id")
    return {"pad_token_id": pad, "decoder_start_token_id": pad if start is None else start}


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield weight("embedding.word.weight", "shared.weight")
    yield from _stack(model, "encoder", model.num_layers)
    yield from _stack(model, "decoder", model.num_decoder_layers)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")


def _stack(model: ModelConfig, stack: str, num_layers: int) -> Iterator[Weight]:
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield weight(f"{stack}.relative_bias.weight", table)
    yield weight(f"{stack}.final_norm.weight", f"{stack}.final_layer_norm.weight")
    for layer in range(num_layers):
        ours, theirs = f"{stack}.layers.{layer}", f"{stack}.block.{layer}.layer"
        yield from _attention(f"{ours}.attention", f"{theirs}.0", "SelfAttention")
        if stack == "decoder":
            yield from _attention(f"{ours}.cross_attention", f"{theirs}.1", "EncDecAttention")
        last = f"{theirs}.{2 if stack == 'decoder' else 1}"
        yield weight(f"{ours}.mlp_norm.weight", f"{last}.layer_norm.weight")
        mlp = f"{last}.DenseReluDense"
        if model.is_gated:
            yield weight(f"{ours}.mlp.fc1.weight", f"{mlp}.wi_0.weight", f"{mlp}.wi_1.weight", form=Stacked())
        else:
            yield weight(f"{ours}.mlp.fc1.weight", f"{mlp}.wi.weight")
        yield weight(f"{ours}.mlp.fc2.weight", f"{mlp}.wo.weight")


def _attention(ours: str, sublayer: str, name: str) -> Iterator[Weight]:
    theirs = f"{sublayer}.{name}"
    yield weight(f"{ours}_norm.weight", f"{sublayer}.layer_norm.weight")
    yield weight(f"{ours}.query.weight", f"{theirs}.q.weight")
    yield weight(f"{ours}.key_value.weight", f"{theirs}.k.weight", f"{theirs}.v.weight", form=Stacked())
    yield weight(f"{ours}.projection.weight", f"{theirs}.o.weight")


T5 = Family(
    name="T5",
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        "vocab_size": 101,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 8,
        # Fewer and nearer than usual, so that a short text has distances in all buckets.
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    absent={
        "d_ff": 2048,
        "d_kv": 64,
        "d_model": 512,
        "num_heads": 8,
        "num_layers": 6,
        "vocab_size": 32128,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
        "is_decoder": False,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-6,
        "n_positions": 512,
        "num_decoder_layers": None,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "scale_decoder_outputs": None,
        "tie_word_embeddings": True,
    },
    without_effect={
        "dense_act_fn": "is said by feed_forward_proj",
        "initializer_factor": "is about random weights",
        "is_gated_act": "is said by feed_forward_proj",
    },
    aliases={
        "head_dim": "d_kv",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
    },
    # transformers 5 ties every T5, also one of v1.1 that it has not read from a file, and saves no output table then.
    taken_for={"lm_head.weight": "shared.weight"},
    base_prefix="",
    auto_class="AutoModelForSeq2SeqLM",
    other_architectures=("T5WithLMHeadModel",),
    word_table_copies=("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    # A table in old files that no model has read.
    token_ids=_token_ids,
    ignored_tensors=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)


def _read_mt5(hub: HubConfig) -> dict[str, Any]:
    # Its class ties the tables whatever the file says, but never scales the decoder's output as the first T5.
    return {**_read(hub), "untie_embeddings_and_output_weights": True}


# Xue et al. 2021 (arXiv:2010.11934): v1.1 with another vocabulary.
MT5 = replace(
    T5,
    name="mT5",
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    other_architectures=(),
    read_config=_read_mt5,
    absent={
        **T5.absent,
        "d_ff": 1024,
        "num_heads": 6,
        "num_layers": 8,
        "vocab_size": 250112,
        "feed_forward_proj": "gated-gelu",
    },
)
