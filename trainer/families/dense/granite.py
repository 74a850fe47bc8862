"""Granite 3: Llama with four multipliers. Torch-free.

IBM 2024, Granite 3.0 language models, section 2; names: transformers models/granite/modeling_granite.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, dense_weights, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("mlp_bias", False)
    biased, embedding = hub.take("attention_bias"), hub.take("embedding_multiplier")
    return {
        **read_shape(hub),
        **read_rope(hub),
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
        "embedding_scale": None if embedding == 1.0 else embedding,
        "softmax_scale": hub.take("attention_multiplier"),
        "residual_multiplier": hub.take("residual_multiplier"),
        "logits_scaling": hub.take("logits_scaling"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "silu",
        "attention_bias": model.has_qkv_bias,
        "mlp_bias": False,
        "embedding_multiplier": model.embedding_scale or 1.0,
        "attention_multiplier": model.softmax_scale or model.head_dim**-0.5,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": model.logits_scaling,
    }


GRANITE = Family(
    name="Granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={
        **TINY,
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    absent={
        **ABSENT,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
)
