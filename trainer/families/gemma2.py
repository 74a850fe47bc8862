"""Gemma 2. Torch-free.

Gemma Team 2024 (arXiv:2408.00118), section 2; names: transformers models/gemma2/modeling_gemma2.py. Norms multiply by
1 + weight, the word embedding by the square root of hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.sections.scales import score_scale
from trainer.families.format.family import Family, Weight, weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_windows, write_windows
from trainer.families.llama import ABSENT as LLAMA_ABSENT
from trainer.families.llama import TINY, attention, ends, mlp, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_ACTIVATION = "gelu_pytorch_tanh"


ABSENT: Mapping[str, Any] = {
    **LLAMA_ABSENT,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "vocab_size": 256000,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": _ACTIVATION,
    "layer_types": None,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
}
"""Meaning of a file without these keys."""

WITHOUT_EFFECT = {
    "hidden_act": "is not read by the class of transformers, which reads hidden_activation",
    "sliding_window_size": "is not read by the class of transformers, which reads sliding_window",
}
"""Keys that change nothing here."""


def read(hub: HubConfig) -> dict[str, Any]:
    """Keys that Gemma 2 and Gemma 3 share, without windows and positions."""
    hub.only("hidden_activation", _ACTIVATION)
    hub.only("use_bidirectional_attention", False)
    biased, scalar = hub.take("attention_bias"), hub.take("query_pre_attn_scalar")
    shape = read_shape(hub)
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
        "softmax_scale": scalar**-0.5 if scalar else 0.0,
        "attn_logit_softcapping": hub.take("attn_logit_softcapping", null=None),
        "final_logit_softcapping": hub.take("final_logit_softcapping", null=None),
    }


def write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """Keys of config.json that Gemma 2 and Gemma 3 share."""
    scale = score_scale(model)
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
    windows = read_windows(hub, layers, [layer % 2 == 0 for layer in range(layers)])
    return {**shape, **read_rope(hub), **windows}


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
    absent=ABSENT,
    without_effect=WITHOUT_EFFECT,
)
