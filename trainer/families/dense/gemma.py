"""Gemma 1: Llama with gates of GeLU, norms of 1 + weight and a scaled word embedding. Torch-free.

Gemma Team 2024 (arXiv:2403.08295), section 2; names: transformers models/gemma/modeling_gemma.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, TINY, dense_weights, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_ACTIVATION = "gelu_pytorch_tanh"


def _read(hub: HubConfig) -> dict[str, Any]:
    # The first files say gelu, and mean its tanh approximation, as transformers does.
    hub.only("hidden_act", _ACTIVATION, "gelu")
    # A name that only transformers 4 reads.
    hub.only("hidden_activation", None, _ACTIVATION)
    hub.only("use_bidirectional_attention", False)
    biased, shape = hub.take("attention_bias"), read_shape(hub)
    return {
        **shape,
        **read_rope(hub),
        "swiglu": False,
        "activation_func": "gelu_tanh",
        "gated_linear_unit": True,
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
        "apply_layernorm_1p": True,
        "embedding_scale": math.sqrt(shape["hidden_size"]),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": _ACTIVATION,
        "hidden_activation": _ACTIVATION,
        "attention_bias": model.has_qkv_bias,
    }


GEMMA = Family(
    name="Gemma 1",
    model_type="gemma",
    architecture="GemmaForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={**TINY, "tie_word_embeddings": True, "head_dim": 8},
    absent={
        **ABSENT,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "vocab_size": 256000,
        "head_dim": 256,
        "hidden_act": _ACTIVATION,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
)
