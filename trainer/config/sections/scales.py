"""Factors and standard deviations that follow from the widths of a model. Torch-free.

Maximal update parametrization: Yang et al. 2022 (arXiv:2203.03466), table 8, with Megatron-LM's choices where the paper
leaves one (NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/transformer_config.py and optimizer/__init__.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def width_ratio(model: ModelConfig) -> float:
    """``hidden_size`` by that of the model whose learning rate is taken; 1 without such a model."""
    return 1.0 if model.mup_base_hidden_size is None else model.hidden_size / model.mup_base_hidden_size


def matrix_std(model: ModelConfig) -> float:
    """Standard deviation of new matrices; see last_matrix_std, table_std and output_std for the others."""
    return model.init_method_std / math.sqrt(width_ratio(model))


def last_matrix_std(model: ModelConfig) -> float:
    """Standard deviation of the last matrix of each sublayer, whose result is added to the residual stream."""
    return matrix_std(model) / math.sqrt(2 * model.num_layers)


def table_std(model: ModelConfig) -> float:
    """Standard deviation of new embedding tables."""
    return model.embedding_init_method_std or model.init_method_std


def output_std(model: ModelConfig) -> float:
    """Standard deviation of an output layer with weights of its own."""
    return model.init_method_std if model.mup_base_hidden_size is None else table_std(model)


def score_scale(model: ModelConfig) -> float:
    """Factor of the product of query and key, with multi-head latent attention before that of yarn."""
    width = model.head_dim
    if model.multi_latent_attention:
        width = (model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0)
    return model.softmax_scale or width ** (-0.5 if model.mup_base_hidden_size is None else -1.0)


def logits_divisor(model: ModelConfig) -> float:
    """Divisor of the logits, with the default filled in."""
    return model.logits_scaling or width_ratio(model)
