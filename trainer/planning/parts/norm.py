"""Norms. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

HIDDEN_BYTES = 30 * 4
"""Bytes per channel and layer: two norms (10 passes), two residual sums (12), rotary positions (8)."""


def parameters(model: ModelConfig, width: int | None = None) -> int:
    """Parameters of one norm over ``width`` channels; None: hidden_size."""
    return (width or model.hidden_size) * (2 if model.normalization == "LayerNorm" else 1)


def layer_parameters(model: ModelConfig) -> int:
    """Parameters of all norms of one layer on the residual stream."""
    count = 4 if model.norm_placement == "sandwich" else 1 if model.shared_parallel_norm else 2
    return count * parameters(model)


def layer_bytes(model: ModelConfig) -> int:
    """Bytes of a layer's norms and residual sums."""
    return HIDDEN_BYTES * model.hidden_size
