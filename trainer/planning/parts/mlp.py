"""The dense feed-forward part. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

GATED_BYTES, PLAIN_BYTES = 8 * 4, 5 * 4
"""Bytes per feed-forward unit: the activation reads inputs and writes outputs, in forward and in backward."""


def parameters(model: ModelConfig, width: int | None = None) -> int:
    """Parameters of a feed-forward network with ``width`` units; None: those of the dense layers."""
    width = width or model.ffn_size
    inner = 2 * width if model.is_gated else width
    weights = model.hidden_size * (inner + width)
    return weights + (0 if model.disable_bias_linear else inner + model.hidden_size)


def activation_bytes(model: ModelConfig, width: int | None = None) -> int:
    """Bytes of the activation of ``width`` units; None: those of the dense layers."""
    return (GATED_BYTES if model.is_gated else PLAIN_BYTES) * (width or model.ffn_size)
