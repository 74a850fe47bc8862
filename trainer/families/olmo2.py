"""OLMo 2: norms on the results of sublayers, and over all queries and keys. Torch-free.

OLMo Team 2025 (arXiv:2501.00656), section 3; names: transformers models/olmo2/modeling_olmo2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, attention, ends, mlp, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def read_without_rope(hub: HubConfig) -> dict[str, Any]:
    """Keys of the model section without rotary positions; also those of OLMo 3."""
    hub.only("hidden_act", *SILU)
    biased = hub.take("attention_bias")
    return {
        **read_shape(hub),
        "norm_placement": "output",
        "qk_layernorm": True,
        "qk_layernorm_scope": "all",
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
    }


def _read(hub: HubConfig) -> dict[str, Any]:
    return {**read_without_rope(hub), **read_rope(hub)}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    shape = write_shape(model, vocab_size, max_positions)
    return {**shape, "hidden_act": "silu", "attention_bias": model.has_qkv_bias}


def weights(model: ModelConfig) -> Iterator[Weight]:
    """All tensors; also those of OLMo 3."""
    yield from ends(model)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield weight(f"{ours}.attention_output_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        yield weight(f"{ours}.mlp_output_norm.weight", f"{theirs}.post_feedforward_layernorm.weight")
        yield from attention(model, layer)
        yield from mlp(layer)


OLMO2 = Family(
    name="OLMo 2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=weights,
    tiny=TINY,
    absent={**ABSENT, "rms_norm_eps": 1e-5, "vocab_size": 50304},
)
