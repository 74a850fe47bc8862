"""Encoder and decoder of T5. Torch-free.

Legend: E encoder and D decoder tokens of a sample, A heads.
Raffel et al. 2020 (arXiv:1910.10683), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import attention, feed_forward, norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig


def layer_parameters(model: ModelConfig) -> int:
    """Parameters of all layers of both stacks."""
    return model.num_layers * encoder_layer(model) + model.num_decoder_layers * decoder_layer(model)


def end_parameters(model: ModelConfig) -> int:
    """Parameters of each stack's final norm and, with relative positions, table of position biases."""
    is_relative = model.position_embedding_type == "relative"
    biases = model.relative_attention_num_buckets * model.num_attention_heads if is_relative else 0
    return 2 * (norm.parameters(model) + biases)


def encoder_layer(model: ModelConfig) -> int:
    """Parameters of one layer of the encoder."""
    return attention.parameters(model) + feed_forward.dense_parameters(model) + 2 * norm.parameters(model)


def decoder_layer(model: ModelConfig) -> int:
    """Parameters of one layer of the decoder, which also attends to the encoder's output."""
    return encoder_layer(model) + attention.parameters(model) + norm.parameters(model)


def sample_flops(config: TrainConfig) -> int:
    """Operations of both stacks for one sample, without the output layer and the position biases.

    The products for keys and values of the encoder's output count E times, all others of the decoder D times.
    """
    model, encoder, decoder = config.model, config.training.seq_length, config.training.decoder_seq_length
    width = model.num_attention_heads * model.head_dim
    keys_and_values = 2 * width * (model.hidden_size + model.has_qkv_bias)
    per_layer = encoder * keys_and_values + decoder * (decoder_layer(model) - keys_and_values)
    products = model.num_layers * encoder * encoder_layer(model) + model.num_decoder_layers * per_layer
    pairs = model.num_layers * encoder**2 + model.num_decoder_layers * decoder * (decoder + encoder)
    ends = norm.parameters(model) * (encoder + decoder)
    return 6 * (products + ends) + 12 * width * pairs
