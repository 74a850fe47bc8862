"""The output layer and the loss. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import norm
from trainer.planning.parts.embedding import word_width

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

LOGIT_BYTES = 4 * 4
"""Bytes per logit: one read and write in forward (exponential), one in backward (gradient).

All forward passes over a block of logits stay in the cache (trainer.model.tensor_parallel.cross_entropy).
"""


def table_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the output table, also where it is the embedding's."""
    return vocab_size * word_width(model)


def parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters besides the table: those that every token passes."""
    projection = model.embedding_size * model.hidden_size if model.embedding_size else 0
    transform = 0
    if model.architecture == "bert":
        transform = model.hidden_size**2 + model.hidden_size + norm.parameters(model)
    return projection + transform + vocab_size * model.has_head_bias


def sample_parameters(model: ModelConfig) -> int:
    """Parameters that one token of each sample passes: BERT's pooler and binary head."""
    if model.architecture != "bert" or not model.bert_binary_head:
        return 0
    return (model.hidden_size + 1) * (model.hidden_size + 2)


def logit_bytes(vocab_size: int) -> int:
    """Bytes of logits and loss."""
    return LOGIT_BYTES * vocab_size
