"""OLMo 3: OLMo 2 with sliding windows in three of four layers. Torch-free.

OLMo Team 2025 (arXiv:2512.13961), section 3; names: transformers models/olmo3/modeling_olmo3.py. Only layers without a
window have scaled angles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import FULL, SLIDING, read_windows, write_windows
from trainer.families.llama import ABSENT, TINY, write_shape
from trainer.families.olmo2 import read_without_rope, weights

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_BASE = 500000.0


def _read(hub: HubConfig) -> dict[str, Any]:
    shape, rope = read_without_rope(hub), read_rope(hub, local_base_key="rope_theta")
    if not hub.has("rope_parameters") and rope["rotary_base"] != _BASE:
        hub.refuse(
            f"rope_theta is {rope['rotary_base']!r}, which transformers 5 gives only the layers without a window, and "
            f"older versions all layers; name the base of {FULL} and of {SLIDING} in rope_parameters"
        )
    layers = shape["num_layers"]
    windows = read_windows(hub, layers, [(layer + 1) % 4 != 0 for layer in range(layers)])
    is_one_table = "rope_scaling" not in rope and rope["rotary_base_local"] == rope["rotary_base"]
    if is_one_table or not windows:
        del rope["rotary_base_local"]
    return {**shape, **rope, **windows}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    shape = write_shape(model.model_copy(update={"rotary_base_local": None}), vocab_size, max_positions)
    local = model.rotary_base_local or model.rotary_base
    if local != model.rotary_base:
        del shape["rope_theta"]  # it would name one base for all layers
    tables = {FULL: shape["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": local}}
    biased = model.has_qkv_bias
    return {
        **shape,
        **write_windows(model),
        "rope_parameters": tables,
        "hidden_act": "silu",
        "attention_bias": biased,
    }


OLMO3 = Family(
    name="OLMo 3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=weights,
    tiny={
        **TINY,
        "sliding_window": 5,
        "rope_parameters": {
            FULL: {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.2,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    absent={
        **ABSENT,
        "vocab_size": 50304,
        "layer_types": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": _BASE,
        "sliding_window": 4096,
    },
)
