"""Models whose experts are balanced otherwise than by the load of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXPERTS = {
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
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_z_loss_coeff": 0.01,
}
BALANCED: Mapping[str, Mapping[str, Any]] = {
    "sinkhorn": {**_EXPERTS, "moe_router_load_balancing_type": "sinkhorn"},
    "sequence-loss": {**_EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
}
