"""Mistral 7B and its dense successors: Llama with a sliding window in early versions. Torch-free.

Jiang et al. 2023 (arXiv:2310.06825), section 2; names: transformers models/mistral/modeling_mistral.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.family import BESIDE_IMAGES, Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, dense_weights, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    window = hub.take("sliding_window", null=None)
    windows = {} if window is None else {"window_size": window}
    return {**read_shape(hub), **read_rope(hub), **windows}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    window = model.window_size if model.window_layers == "all" else None
    return {**write_shape(model, vocab_size, max_positions), "hidden_act": "silu", "sliding_window": window}


MISTRAL = Family(
    name="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    wrapped_in=("mistral3",),
    wrapped_names=BESIDE_IMAGES,
    tiny={**TINY, "sliding_window": 5, "head_dim": 8},
    absent={
        **ABSENT,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
