"""Gemma 2. Torch-free.

Gemma Team 2024 (arXiv:2408.00118), section 2; names: transformers models/gemma2/modeling_gemma2.py. Norms multiply by
1 + weight, the word embedding by the square root of hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.windows import read_windows, write_windows
from trainer.families.llama import TINY, attention, ends, mlp, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_ACTIVATION = "gelu_pytorch_tanh"


def read(hub: HubConfig) -> dict[str, Any]:
    """Keys that Gemma 2 and Gemma 3 share, without windows and soft caps."""
    hub.only("hidden_activation", _ACTIVATION)
    # Ignored by transformers, too, where hidden_activation is given.
    hub.ignore("hidden_act")
    hub.only("use_bidirectional_attention", False)
    biased = hub.take("attention_bias", False)
    shape = read_shape(hub, ties=True)
    shape["kv_channels"] = hub.take("head_dim", 256)
    return {
        **shape,
        "swiglu": False,
        "activation_func": "gelu_tanh",
        "gated_linear_unit": True,
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "embedding_scale": math.sqrt(shape["hidden_size"]),
        "softmax_scale": hub.take("query_pre_attn_scalar", 256) ** -0.5,
    }


def write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """Keys of config.json that Gemma 2 and Gemma 3 share."""
    scale = model.softmax_scale or model.head_dim**-0.5
    scalar = scale**-2
    return {
        **write_shape(model, vocab_size, max_positions),
        **write_windows(model),
        "hidden_activation": _ACTIVATION,
        "attention_bias": model.has_qkv_bias,
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-12) else scalar,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


def weights(model: ModelConfig) -> Iterator[Weight]:
    """All tensors; also those of Gemma 3."""
    yield from ends(model)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield weight(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
        yield weight(f"{ours}.attention_output_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        yield weight(f"{ours}.mlp_norm.weight", f"{theirs}.pre_feedforward_layernorm.weight")
        yield weight(f"{ours}.mlp_output_norm.weight", f"{theirs}.post_feedforward_layernorm.weight")
        yield from attention(model, layer)
        yield from mlp(layer)


def _read(hub: HubConfig) -> dict[str, Any]:
    shape = read(hub)
    layers = shape["num_layers"]
    return {
        **shape,
        **read_windows(hub, layers, [layer % 2 == 0 for layer in range(layers)], absent=4096),
        "attn_logit_softcapping": hub.given("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": hub.given("final_logit_softcapping", 30.0),
    }


GEMMA2 = Family(
    name="Gemma 2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read_config=_read,
    write_config=write,
    weights=weights,
    tiny={
        **TINY,
        "tie_word_embeddings": True,
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
)
