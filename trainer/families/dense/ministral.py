"""Ministral: Mistral with a sliding window in some layers, or with scaled queries. Torch-free.

Names: transformers models/ministral (8B) and models/ministral3 (Ministral 3, its text model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.family import BESIDE_IMAGES, Family
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


def _read_scaled(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    shape, window = read_shape(hub), hub.take("sliding_window", null=None)
    rope = read_rope(hub, unscaled=_unscaled(shape["max_position_embeddings"]), scales_queries=True)
    scaling = rope.get("rope_scaling", {"rope_type": "default"})
    # Files repeat the length in this table.
    if scaling.pop("max_position_embeddings", shape["max_position_embeddings"]) != shape["max_position_embeddings"]:
        hub.refuse("max_position_embeddings of the rotary positions differs from that of the model")
    if "llama_4_scaling_beta" not in scaling:
        hub.refuse(
            f"rope_type {scaling['rope_type']} has no llama_4_scaling_beta, without which transformers cannot run"
        )
    return {**shape, **rope, **({} if window is None else {"window_size": window})}


def _unscaled(longest: int) -> dict[str, Any]:
    """Meaning of a file of Ministral 3 without scaling."""
    return {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": longest,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {**write_shape(model, vocab_size, max_positions), **write_windows(model), "hidden_act": "silu"}


def _write_scaled(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    window = model.window_size if model.window_layers == "all" else None
    return {**write_shape(model, vocab_size, max_positions), "hidden_act": "silu", "sliding_window": window}


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

MINISTRAL3 = Family(
    name="Ministral 3",
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    read_config=_read_scaled,
    write_config=_write_scaled,
    weights=dense_weights,
    wrapped_in=("mistral3",),
    wrapped_names=BESIDE_IMAGES,
    tiny={
        **TINY,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    absent={
        **MISTRAL.absent,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "num_hidden_layers": 34,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    without_effect={"layer_types": "is not read by the class of transformers"},
)
