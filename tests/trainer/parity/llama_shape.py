"""The small Llama of which other models of the parity tests are variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LLAMA: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
