"""Multi-token prediction: for each further token two norms, a projection, a layer and a norm. Torch-free.

DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2. Embedding and output layer are the model's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import block, norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def parameters(model: ModelConfig, *, active: bool) -> int:
    """Parameters of all prediction layers; their blocks are like the model's last layer."""
    one = (
        3 * norm.parameters(model)
        + merge_parameters(model)
        + block.parameters(model, model.num_layers - 1, active=active)
    )
    return model.mtp_num_layers * one


def merge_parameters(model: ModelConfig) -> int:
    """Parameters of one layer's projection of token and hidden, 2 H to H."""
    return 2 * model.hidden_size**2
