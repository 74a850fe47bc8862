"""Gemma 3, its text model. Torch-free.

Gemma Team 2025 (arXiv:2503.19786), section 2; names: transformers models/gemma3/modeling_gemma3.py. Layers with a
window have their own base of rotary positions.
"""

from __future__ import annotations

from typing import Any

from trainer.families.format.family import BESIDE_IMAGES, Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_windows
from trainer.families.gemma2 import ABSENT, WITHOUT_EFFECT, read, weights, write
from trainer.families.llama import TINY


def _read(hub: HubConfig) -> dict[str, Any]:
    shape = read(hub)
    layers = shape["num_layers"]
    pattern = hub.take("sliding_window_pattern")
    if not hub.has("layer_types"):
        hub.only("_sliding_window_pattern", pattern)
    return {
        **shape,
        **read_rope(hub, local_base_key="rope_local_base_freq"),
        **read_windows(hub, layers, [(layer + 1) % pattern != 0 for layer in range(layers)]),
        "qk_layernorm": True,
    }


GEMMA3 = Family(
    name="Gemma 3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read_config=_read,
    write_config=write,
    weights=weights,
    tiny={
        **TINY,
        "tie_word_embeddings": True,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    wrapped_in=("gemma3",),
    wrapped_names=BESIDE_IMAGES,
    absent={
        **ABSENT,
        "vocab_size": 262208,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "sliding_window_pattern": 6,
        "use_bidirectional_attention": False,
    },
    without_effect={**WITHOUT_EFFECT, "_sliding_window_pattern": "is said by layer_types"},
)
