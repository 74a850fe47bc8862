"""Ministral 8B: Mistral with a sliding window in some layers. Torch-free.

Names: transformers models/ministral/modeling_ministral.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_windows, write_windows
from trainer.families.llama import SILU, TINY, dense_weights, read_shape, write_shape
from trainer.families.mistral import MISTRAL

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    shape = read_shape(hub)
    layers = shape["num_layers"]
    return {**shape, **read_rope(hub), **read_windows(hub, layers, [True] * layers)}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {**write_shape(model, vocab_size, max_positions), **write_windows(model), "hidden_act": "silu"}


MINISTRAL = Family(
    name="Ministral",
    model_type="ministral",
    architecture="MinistralForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={
        **TINY,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    },
    absent={**MISTRAL.absent, "layer_types": None},
)
