"""EncoderDecoder: the whole of T5, divided over tp; the one stage of its pipeline.

Legend: E encoder and D decoder sequence, B micro-batch, H hidden, V padded vocabulary; ``/t`` = divided over tp.
With RMSNorm, gated gelu_tanh, no biases, scale 1 and an output table of its own the model is T5 v1.1. With ReLU and the
word table as output table it is the first T5, whose decoder output is scaled by 1 / sqrt(H) (Raffel et al. 2020,
arXiv:1910.10683, section 2.1). With LayerNorm, biases, a table of learned positions for both stacks, and the word table
and a bias as output layer it is Megatron-LM's T5 (megatron/core/models/T5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.config.sections.scales import table_std
from trainer.config.train_config import TrainConfig
from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.encoder_decoder.layer import Source
from trainer.model.encoder_decoder.stack import Stack, Tables
from trainer.model.head import GPTHead
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder
from trainer.model.stage import Stage
from trainer.model.tensor_parallel.collectives import enter_parallel_region

if TYPE_CHECKING:
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.model.cache import KeyValueCache


class EncoderDecoder(Stage):
    """Encoder tokens and decoder tokens to the loss of the decoder's labels."""

    def __init__(self, config: TrainConfig, vocab_size: int, builder: ParameterBuilder, axes: ParallelAxes):
        """Build the model.

        Args:
            config: the whole training config.
            vocab_size: rows of the vocabulary without padding.
            builder: makes the parameters and records them.
            axes: the axes along which layers are divided.
        """
        model = config.model
        super().__init__(builder.dtype, model.hidden_size, axes)
        rows = (model.padded_vocab_size(vocab_size, builder.mesh.tp), model.hidden_size)

        def table(name: str, std: float, *, is_normal: bool = False) -> nn.Parameter:
            return builder.under(name).weight(
                "weight", rows, std=std, is_normal=is_normal, tp_dim=0, valid_rows=vocab_size
            )

        is_normal = model.embedding_init_method_std is not None
        word = table("embedding.word", table_std(model), is_normal=is_normal)
        position: nn.Parameter | None = None
        if model.position_embedding_type == "learned_absolute":
            position = builder.under("embedding.position").weight(
                "weight",
                (config.max_position_embeddings, model.hidden_size),
                std=table_std(model),
                is_normal=is_normal,
                on_sequence_shard=True,
            )
        tables = Tables(word, position)
        self._rotary = RotaryTable.of(model, config.max_position_embeddings, builder.dtype, builder.device)
        layers = range(model.num_layers)
        self.encoder = Stack(config, tables, layers, builder.under("encoder"), axes, is_decoder=False)
        layers = range(model.num_layers, model.num_layers + model.num_decoder_layers)
        self.decoder = Stack(config, tables, layers, builder.under("decoder"), axes, is_decoder=True)
        is_tied = not model.untie_embeddings_and_output_weights
        self._output_scale = model.hidden_size**-0.5 if model.scales_decoder_output else 1.0
        output = word if is_tied else table("head", model.init_method_std)
        chunk = config.training.chunk_of_loss
        self.head = GPTHead(model, output, vocab_size, builder.under("head"), axes.tp, chunk_size=chunk)

    def forward(
        self,
        hidden: torch.Tensor | None,
        micro_batch: MicroBatch,
        randomness: MicroBatchRandomness | None,
        compute_loss: bool = True,
        aux_loss_scale: float = 0.0,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """See Stage.

        Collective: all tp ranks. The micro-batch's tokens, labels and loss mask are the decoder's. ``aux_loss_scale``
        has no effect, since no layer has an auxiliary loss. ``cache`` must be None.
        """
        assert cache is None, "text is continued by decoders only"
        assert hidden is None and micro_batch.encoder_tokens is not None and micro_batch.encoder_mask is not None
        del aux_loss_scale
        mask, tokens = micro_batch.encoder_mask, micro_batch.encoder_tokens.t()
        encoded = self.encoder(tokens, self._pass_over(tokens, randomness), mask)  # [E(/t), B, H]
        # One collective for the keys and values of all layers.
        source = Source(enter_parallel_region(encoded, self._axes.tp), mask)
        tokens = micro_batch.tokens.t()
        decoded = self.decoder(tokens, self._pass_over(tokens, randomness), source=source)  # [D(/t), B, H]
        if self._output_scale != 1.0:
            decoded = decoded * self._output_scale
        if not compute_loss:
            logits: torch.Tensor = self.head(decoded)  # [D, B, V/t]
            return logits[..., : self.head.num_valid]
        loss: torch.Tensor = self.head(decoded, micro_batch)
        return loss

    def _pass_over(self, tokens: torch.Tensor, randomness: MicroBatchRandomness | None) -> ForwardPass:
        rotary = None if self._rotary is None else self._rotary.first(len(tokens))
        return ForwardPass(rotary, randomness=randomness)
