"""EncoderDecoder: the whole of T5, divided over tp; the one stage of its pipeline.

Legend: E encoder and D decoder sequence, B micro-batch, H hidden, V padded vocabulary; ``/t`` = divided over tp.
With RMSNorm, gated gelu_tanh, no biases, scale 1 and an output table of its own the model is T5 v1.1. With ReLU and the
word table as output table it is the first T5, whose decoder output is scaled by 1 / sqrt(H) (Raffel et al. 2020,
arXiv:1910.10683, section 2.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.config.train_config import TrainConfig
from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.encoder_decoder.layer import Source
from trainer.model.encoder_decoder.stack import Stack
from trainer.model.head import GPTHead
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

        word = table("embedding.word", model.embedding_std, is_normal=model.embedding_init_method_std is not None)
        layers = range(model.num_layers)
        self.encoder = Stack(config, word, layers, builder.under("encoder"), axes, is_decoder=False)
        layers = range(model.num_layers, model.num_layers + model.num_decoder_layers)
        self.decoder = Stack(config, word, layers, builder.under("decoder"), axes, is_decoder=True)
        is_tied = not model.untie_embeddings_and_output_weights
        self._output_scale = model.hidden_size**-0.5 if is_tied else 1.0
        output = word if is_tied else table("head", model.init_method_std)
        self.head = GPTHead(model, output, vocab_size, builder.under("head"), axes.tp)

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
        forward_pass = ForwardPass(randomness=randomness)
        mask = micro_batch.encoder_mask
        encoded = self.encoder(micro_batch.encoder_tokens.t(), forward_pass, mask)  # [E(/t), B, H]
        # One collective for the keys and values of all layers.
        source = Source(enter_parallel_region(encoded, self._axes.tp), mask)
        decoded = self.decoder(micro_batch.tokens.t(), forward_pass, source=source)  # [D(/t), B, H]
        if self._output_scale != 1.0:
            decoded = decoded * self._output_scale
        if not compute_loss:
            logits: torch.Tensor = self.head(decoded)  # [D, B, V/t]
            return logits[..., : self.head.num_valid]
        loss: torch.Tensor = self.head(decoded, micro_batch)
        return loss
