"""Models whose experts are balanced otherwise than by the load of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.trainer.parity.llama_shape import LLAMA

_EXPERTS = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_z_loss_coeff": 0.01}
BALANCED: Mapping[str, Mapping[str, Any]] = {
    "sinkhorn": {**_EXPERTS, "moe_router_load_balancing_type": "sinkhorn"},
    "sequence-loss": {**_EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
}
