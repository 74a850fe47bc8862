"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. Torch-free.

Yang et al. 2024 (arXiv:2407.10671), section 2.2; names: transformers models/qwen2/modeling_qwen2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import read_late_windows, write_windows
from trainer.families.llama import ABSENT as LLAMA_ABSENT
from trainer.families.llama import SILU, TINY, dense_weights, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


ABSENT: Mapping[str, Any] = {
    **LLAMA_ABSENT,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "layer_types": None,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
"""Meaning of a file without these keys; also of one of Qwen3, but for head_dim."""


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    shape = read_shape(hub)
    return {**shape, **read_rope(hub), **read_late_windows(hub, shape["num_layers"]), "add_qkv_bias": True}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    windows = write_windows(model)
    return {
        **write_shape(model, vocab_size, max_positions),
        **windows,
        "use_sliding_window": model.window_size is not None,
        "hidden_act": "silu",
    }


QWEN2 = Family(
    name="Qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={
        **TINY,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    absent=ABSENT,
    without_effect={
        "attention_bias": "is not read by the class of transformers: queries, keys and values have biases",
        "use_mrope": "is not read by the class of transformers; it is about images",
    },
)
