"""Seed-OSS: Llama with biases of queries, keys and values, and dropout. Torch-free.

Names: transformers models/seed_oss/modeling_seed_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, dense_weights, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_ABSENT: Mapping[str, Any] = {
    **ABSENT,
    "intermediate_size": 27648,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "vocab_size": 155136,
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
}


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("mlp_bias", False)
    return {
        **read_shape(hub),
        **read_rope(hub),
        "hidden_dropout": hub.take("residual_dropout"),
        "add_qkv_bias": hub.take("attention_bias"),
        "add_attention_output_bias": hub.take("attention_out_bias"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "silu",
        "residual_dropout": model.hidden_dropout,
        "attention_bias": model.has_qkv_bias,
        "attention_out_bias": model.has_attention_output_bias,
        "mlp_bias": False,
    }


def _notes(keys: Mapping[str, Any]) -> Iterator[str]:
    rate = keys.get("residual_dropout", _ABSENT["residual_dropout"])
    if rate:
        yield (
            f"residual_dropout {rate} is of the results of sublayers; model.hidden_dropout, which is {rate} here, also "
            "drops from the embedding; it changes training, but no logit"
        )


SEED_OSS = Family(
    name="Seed-OSS",
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    # With the biases of the published models it would be a Qwen2.
    tiny={**TINY, "head_dim": 8, "attention_bias": False, "attention_out_bias": True},
    notes=_notes,
    absent=_ABSENT,
)
