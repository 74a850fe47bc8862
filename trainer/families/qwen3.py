"""Qwen3: Llama with norms of queries and keys. Torch-free.

Yang et al. 2025 (arXiv:2505.09388), section 2; names: transformers models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_late_windows, write_windows
from trainer.families.llama import SILU, TINY, dense_weights, read_shape, write_shape
from trainer.families.qwen2 import ABSENT

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def read(hub: HubConfig) -> dict[str, Any]:
    """Keys of the model section without windows; also those of Qwen3-MoE."""
    hub.only("hidden_act", *SILU)
    biased = hub.take("attention_bias")
    return {
        **read_shape(hub),
        **read_rope(hub),
        "qk_layernorm": True,
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
    }


def _read(hub: HubConfig) -> dict[str, Any]:
    shape = read(hub)
    return {**shape, **read_late_windows(hub, shape["num_layers"])}


def write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """Keys of config.json without windows; also those of Qwen3-MoE."""
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "silu",
        "attention_bias": model.has_qkv_bias,
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    windows = {**write_windows(model), "use_sliding_window": model.window_size is not None}
    return {**write(model, vocab_size, max_positions), **windows}


QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={**TINY, "head_dim": 16},
    absent={**ABSENT, "head_dim": 128},
    without_effect={"use_qk_norm": "is not read by the class of transformers: queries and keys have norms"},
)
