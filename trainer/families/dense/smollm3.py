"""SmolLM3: Llama with layers that do not rotate. Torch-free.

Hugging Face 2025, SmolLM3; Yang et al. 2025 (arXiv:2501.18795) for such layers; names: transformers models/smollm3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_switched_windows, write_windows
from trainer.families.llama import ABSENT, SILU, TINY, dense_weights, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("mlp_bias", False)
    biased, shape = hub.take("attention_bias"), read_shape(hub)
    skips = _layers_without_rope(hub, shape["num_layers"])
    return {
        **shape,
        **read_rope(hub),
        **read_switched_windows(hub, len(skips), skips),
        "no_rope_freq": skips if any(skips) else None,
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
    }


def _layers_without_rope(hub: HubConfig, num_layers: int) -> list[bool]:
    interval, rotates = hub.take("no_rope_layer_interval"), hub.take("no_rope_layers", null=None)
    if rotates is None:
        return [(layer + 1) % interval == 0 for layer in range(num_layers)]
    # The key is the other way round than its name: 1 rotates.
    if not isinstance(rotates, list) or len(rotates) != num_layers or any(entry not in (0, 1) for entry in rotates):
        raise FamilyError(
            f"{hub.where}: no_rope_layers is {rotates!r}; use a list with 1 for each layer that rotates, 0 for the "
            f"others, of num_hidden_layers {num_layers}"
        )
    return [not entry for entry in rotates]


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        **write_windows(model),
        "use_sliding_window": model.window_size is not None,
        "no_rope_layers": [int(model.has_rope(layer)) for layer in range(model.num_layers)],
        "hidden_act": "silu",
        "attention_bias": model.has_qkv_bias,
        "mlp_bias": False,
    }


SMOLLM3 = Family(
    name="SmolLM3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={**TINY, "no_rope_layers": [1, 0, 1, 1]},
    absent={
        **ABSENT,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "vocab_size": 128256,
        "layer_types": None,
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    without_effect={"max_window_layers": "is not read by the class of transformers"},
)
