"""GPTStage: the part of a transformer with one stack on one pipeline stage, divided over tp.

Legend: S this rank's part of the sequence, B micro-batch, H hidden, V padded vocabulary; ``/t`` = divided over tp.
Activations are [S, B, H], or [S/t, B, H] under sequence parallelism.
With learned positions, LayerNorm and openai_gelu (Hugging Face's "gelu_new") the architecture is GPT-2's; with rotary
positions, RMSNorm, SwiGLU and no biases it is Llama's. With token types, attention in both directions and two heads it
is BERT's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import output_std, table_std
from trainer.config.train_config import TrainConfig
from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.block import Block
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.embedding import GPTEmbedding
from trainer.model.head import BertHead, GPTHead, TokenLoss
from trainer.model.linear_bias import LinearBias
from trainer.model.mtp import FurtherPredictions, prediction_layers
from trainer.model.norm import Norm, Residual
from trainer.model.recompute import RecomputePlan, recompute
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder
from trainer.model.stage import Stage

if TYPE_CHECKING:
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.model.cache import KeyValueCache


class GPTStage(Stage):
    """A virtual stage of one stack of layers.

    The first stage begins with the embedding; the last ends with final norm, LM head, loss and multi-token prediction.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocab_size: int,
        layers: range,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        *,
        is_first: bool,
        is_last: bool,
        token_loss: TokenLoss | None = None,
    ):
        """Build the virtual stage that holds ``layers`` (numbers in the whole model).

        Args:
            config: the whole training config.
            vocab_size: rows of the vocabulary without padding.
            layers: numbers of the stage's layers in the whole model.
            builder: makes the parameters and records those of this stage. A table that an earlier chunk of the
                same rank has made is shared.
            axes: the axes along which layers are divided.
            is_first: the stage begins with the embedding.
            is_last: the stage ends with the loss.
            token_loss: the user's loss; None: that of the architecture.
        """
        model = config.model
        super().__init__(builder.dtype, model.hidden_size, axes)
        is_tied = not model.untie_embeddings_and_output_weights
        self.embedding: GPTEmbedding | None = None
        if is_first:
            table = _vocab_table(model, "embedding.word", vocab_size, builder)
            self.embedding = GPTEmbedding(config, table, builder.under("embedding"), axes)
        plan = RecomputePlan.build(config.training, len(layers))
        self._runs = plan.runs(len(layers))
        # Fully sharded weights are gathered when gradients reach a layer's results; two results would gather
        # some weights twice.
        defers_add = config.parallel.zero_stage < 2
        self.layers = nn.ModuleList(
            Block(model, layer, builder.under(f"layers.{layer}"), axes, plan.modules_of(place), defers_add=defers_add)
            for place, layer in enumerate(layers)
        )
        self.final_norm: Norm | None = None
        self.head: GPTHead | None = None
        self.further: FurtherPredictions | None = None
        if is_last:
            if model.has_final_norm:
                self.final_norm = Norm.of(model, builder.under("final_norm"))
            table = _vocab_table(model, "embedding.word" if is_tied else "head", vocab_size, builder)
            parts = (model, table, vocab_size, builder.under("head"), axes.tp)
            chunk = config.training.chunk_of_loss
            is_bert = model.architecture == "bert"
            self.head = BertHead(*parts, chunk) if is_bert else GPTHead(*parts, token_loss, chunk)
            if model.mtp_num_layers:
                tables = (_vocab_table(model, "embedding.word", vocab_size, builder), table)
                self.prediction_layers = nn.ModuleList(prediction_layers(config, builder, axes, plan.modules))
                self.further = FurtherPredictions(config, tables, vocab_size, builder, axes)
        shape = (config.max_position_embeddings, builder.dtype, builder.device)
        self._rotary = RotaryTable.of(model, *shape)
        self._rotary_local = RotaryTable.of(model, *shape, local=True)
        self._linear_bias = LinearBias.of(model, *shape, axes.tp.rank, axes.tp.size)

    def forward(
        self,
        hidden: torch.Tensor | None,
        micro_batch: MicroBatch,
        randomness: MicroBatchRandomness | None,
        compute_loss: bool = True,
        aux_loss_scale: float = 0.0,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """See Stage."""
        tokens = micro_batch.tokens.t()  # [S, B]
        positions = micro_batch.positions if cache is None else cache.positions
        if positions is not None:
            positions = self._axes.cp.shard(positions.t(), 0)  # [S/c, B]
        if self.embedding is not None:
            types = micro_batch.token_types
            hidden = self.embedding(tokens, randomness, positions, None if types is None else types.t())
        assert hidden is not None, "only the first stage takes no input from another stage"
        forward_pass = ForwardPass(
            self._rotary_of(self._rotary, tokens, positions),
            micro_batch.documents,
            randomness,
            aux_loss_scale,
            limits_experts=randomness is not None,
            rotary_local=self._rotary_of(self._rotary_local, tokens, positions),
            key_mask=micro_batch.padding_mask,
            cache=cache,
            linear_bias=self._linear_bias_of(tokens, cache),
        )
        stream = Residual(hidden)
        for run in self._runs:
            if len(run) == 1:  # a layer recomputes itself
                stream = self.layers[run.start](stream, forward_pass)
            else:
                # Summed, so that recompute keeps one tensor instead of two.
                stream = Residual(recompute(partial(self._run_layers, run, forward_pass), stream.total()))
        if self.head is None:
            return stream.total()
        if cache is not None:
            stream = Residual(cache.last(stream.total()))
        hidden = stream.total() if self.final_norm is None else self.final_norm(*stream)
        if not compute_loss:
            logits: torch.Tensor = self.head(hidden)  # [S, B, V/t]
            return logits[..., : self.head.num_valid]
        loss: torch.Tensor = self.head(hidden, micro_batch)
        if self.further is None or not micro_batch.further:
            return loss
        further: torch.Tensor = self.further(self.prediction_layers, hidden, micro_batch.further, forward_pass)
        # Only the gradient takes part: the value is that of the next token's loss.
        return loss + (further - further.detach())

    def _run_layers(
        self, run: range, forward_pass: ForwardPass, hidden: torch.Tensor, *, needs_values: bool
    ) -> torch.Tensor:
        stream = Residual(hidden)
        for place in run:
            stream = self.layers[place](stream, forward_pass, needs_values or place < run[-1])
        return stream.total()

    def _rotary_of(
        self, table: RotaryTable | None, tokens: torch.Tensor, positions: torch.Tensor | None
    ) -> RotaryTable | None:
        if table is None:
            return None
        cp = self._axes.cp
        length = len(tokens) * cp.size
        table = table.of_rows(length)
        if positions is not None:
            return table.at(positions)
        return table.first(length).each(lambda part: cp.shard(part, 0))

    def _linear_bias_of(self, tokens: torch.Tensor, cache: KeyValueCache | None) -> LinearBias | None:
        if self._linear_bias is None:
            return None
        # Distances count along the sequence: positions may restart within it, which would change them.
        if cache is not None and cache.positions is not None:
            return self._linear_bias.at(cache.positions)
        cp = self._axes.cp
        return self._linear_bias.first(len(tokens) * cp.size).each(lambda part: cp.shard(part, 1))


def _vocab_table(model: ModelConfig, name: str, vocab_size: int, builder: ParameterBuilder) -> nn.Parameter:
    known = builder.parameters.get(f"{name}.weight")
    if known is not None:
        return known
    is_embedding = name == "embedding.word"
    return builder.under(name).weight(
        "weight",
        (model.padded_vocab_size(vocab_size, builder.mesh.tp), model.word_embedding_size),
        std=table_std(model) if is_embedding else output_std(model),
        is_normal=is_embedding and model.embedding_init_method_std is not None,
        tp_dim=0,
        tied_over_stages=is_embedding and len(builder.mesh.embedding_ranks) > 1,
        valid_rows=vocab_size,
    )
