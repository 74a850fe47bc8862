"""The input embedding: tables, and the projection of a narrow word table. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

LOOKUP_BYTES = 5 * 4
"""Bytes per channel: forward reads and writes a row; backward reads its gradient and adds it to the table's.

Only the rows looked up are touched (trainer.data_parallel.main_gradient.MainGradient.add_rows).
"""


def word_width(model: ModelConfig) -> int:
    """Width of the word table."""
    return model.embedding_size or model.hidden_size


def table_parameters(model: ModelConfig, vocab_size: int, max_positions: int) -> int:
    """Parameters of the tables, which are looked up and not multiplied."""
    learned = model.position_embedding_type == "learned_absolute"
    positions = max_positions + model.position_embedding_offset if learned else 0
    return vocab_size * word_width(model) + (positions + model.token_types) * model.hidden_size


def parameters(model: ModelConfig) -> int:
    """Parameters besides the tables."""
    projection = model.embedding_size * model.hidden_size if model.embedding_size else 0
    of_words = 2 * model.hidden_size if model.embedding_layer_norm else 0
    return projection + of_words + (norm.parameters(model) if model.has_embedding_norm else 0)


def lookup_bytes(model: ModelConfig) -> int:
    """Bytes of the look-up."""
    return LOOKUP_BYTES * model.hidden_size
