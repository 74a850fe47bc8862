"""Parameter counts and FLOPs per token of a model. Torch-free.

tflops_per_device and mfu in metrics.jsonl use this convention: one token of training costs

    6 N + 12 l h s      floating-point operations, with

- N: all parameters that a token passes through, without the input embedding (word and position tables), which is a
  look-up and not a matrix product. Of the experts of a layer only those selected for the token count. The output layer
  is a matrix product, so its table counts once, even if tied to the input embedding. 2 operations per parameter in
  forward and 4 in backward (Kaplan et al. 2020, section 2.1).
- 12 l h s: attention scores and weighted values over l layers, width h = heads x head width and s tokens, without a
  discount for the causal mask (Chowdhery et al. 2022, PaLM, appendix B).

These are model FLOPs, not hardware FLOPs: recomputation does not count. The vocabulary counts without padding, so that
the number is the same for every parallel layout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.parts import attention, block, embedding, encoder_decoder, head, mtp, norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of the whole model, without vocabulary padding.

    Attributes:
        input_embedding: word table and learned tables of positions and token types.
        layers: all transformer layers, with all their experts, and those of multi-token prediction.
        active_layers: all transformer layers, with only the experts selected for one token.
        ends: projections and norms at both ends of the model.
        samples: what one token of each sample passes, such as BERT's binary head; its operations do not count.
        output_layer: the output table; 0 if tied to the input embedding.
    """

    input_embedding: int
    layers: int
    active_layers: int
    ends: int
    output_layer: int
    samples: int = 0

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.input_embedding + self.layers + self.ends + self.output_layer + self.samples

    @property
    def active(self) -> int:
        """Number of parameters used by one token; in a dense model all parameters."""
        return self.total - self.layers + self.active_layers


def count_parameters(config: TrainConfig, vocab_size: int) -> ParameterCounts:
    """Count the parameters of the config's model with a vocabulary of ``vocab_size`` tokens."""
    model = config.model
    ends = embedding.parameters(model) + head.parameters(model, vocab_size)
    if model.is_encoder_decoder:
        every = active = encoder_decoder.layer_parameters(model)
        ends += encoder_decoder.end_parameters(model)
    else:
        layers = range(model.num_layers)
        every, active = (
            sum(block.parameters(model, layer, active=only) for layer in layers) + mtp.parameters(model, active=only)
            for only in (False, True)
        )
        ends += norm.parameters(model) if model.has_final_norm else 0
    return ParameterCounts(
        input_embedding=embedding.table_parameters(model, vocab_size, config.max_position_embeddings),
        layers=every,
        active_layers=active,
        ends=ends,
        output_layer=head.table_parameters(model, vocab_size) if model.untie_embeddings_and_output_weights else 0,
        samples=head.sample_parameters(model),
    )


@dataclass(frozen=True)
class EqualLayers:
    """Layers of a model with the same number of parameters.

    Attributes:
        kind: such as "encoder layers".
        count: number of these layers.
        parameters: of one of them.
        active: parameters of one of them that a token uses.
    """

    kind: str
    count: int
    parameters: int
    active: int


def count_by_layer(model: ModelConfig) -> list[EqualLayers]:
    """All layers of ``model``, equal ones together. Their sum is ParameterCounts.layers."""
    if model.is_encoder_decoder:
        encoder, decoder = encoder_decoder.encoder_layer(model), encoder_decoder.decoder_layer(model)
        return [
            EqualLayers("encoder layers", model.num_layers, encoder, encoder),
            EqualLayers("decoder layers", model.num_decoder_layers, decoder, decoder),
        ]
    layers = Counter(
        (
            "layers with experts" if model.is_moe_layer(layer) else "layers",
            block.parameters(model, layer, active=False),
            block.parameters(model, layer, active=True),
        )
        for layer in range(model.num_layers)
    )
    found = [EqualLayers(kind, count, every, active) for (kind, every, active), count in layers.items()]
    if model.mtp_num_layers:
        every, active = (mtp.parameters(model, active=only) // model.mtp_num_layers for only in (False, True))
        found.append(EqualLayers("prediction layers", model.mtp_num_layers, every, active))
    return found


def flops_per_token(config: TrainConfig, vocab_size: int) -> int:
    """FLOPs of forward and backward per token: 6 N + 12 l h s, with windows of attention counted as they are.

    With encoder and decoder, whose tokens pass through different parameters, the mean over all tokens of a sample.
    """
    model = config.model
    if model.is_encoder_decoder:
        output = 6 * head.table_parameters(model, vocab_size) * config.training.decoder_seq_length
        return (encoder_decoder.sample_flops(config) + output) // config.tokens_per_sample
    counts = count_parameters(config, vocab_size)
    counted = counts.active_layers + counts.ends + head.table_parameters(model, vocab_size) * (1 + model.mtp_num_layers)
    layers = [*range(model.num_layers), *[model.num_layers - 1] * model.mtp_num_layers]
    scores = sum(attention.score_flops(model, layer, config.training.seq_length) for layer in layers)
    return 6 * counted + scores
