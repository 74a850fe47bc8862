"""GPTStage: the part of a decoder-only transformer on one pipeline stage, divided over tp.

Legend: S this rank's part of the sequence, B micro-batch, H hidden, V padded vocabulary; ``/t`` = divided over tp.
Activations are [S, B, H], or [S/t, B, H] under sequence parallelism.
With learned positions, LayerNorm and openai_gelu (Hugging Face's "gelu_new") the architecture is GPT-2's; with rotary
positions, RMSNorm, SwiGLU and no biases it is Llama's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.sections import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.block import Block
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.norm import Norm, Residual
from trainer.model.recompute import RecomputePlan, recompute
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trainer.model.tensor_parallel.embedding import VocabParallelEmbedding
from trainer.model.tensor_parallel.linear import ColumnParallelLinear

if TYPE_CHECKING:
    from trainer.data.samples.batches import MicroBatch


class GPTEmbedding(nn.Module):
    """Tokens [S, B] -> [S(/t), B, H]: word embedding, plus learned position embedding if any, then dropout."""

    def __init__(self, config: TrainConfig, word_table: nn.Parameter, builder: ParameterBuilder, axes: ParallelAxes):
        super().__init__()
        model = config.model
        self._axes = axes
        self._dropout = model.hidden_dropout
        self._kernels = builder.kernels
        self.word = VocabParallelEmbedding(word_table, axes.tp)
        self.position: nn.Parameter | None = None
        if model.position_embedding_type == "learned_absolute":
            self.position = builder.under("position").weight(
                "weight",
                (config.max_position_embeddings, model.hidden_size),
                std=model.init_method_std,
                on_sequence_shard=True,
            )

    def forward(
        self, tokens: torch.Tensor, randomness: MicroBatchRandomness | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``positions`` [S, B]; None counts positions along the sequence.

        Collective: all tp ranks, and all dp x cp ranks if they shard the stage's weights.
        """
        hidden: torch.Tensor = self.word(tokens)
        if self.position is not None:
            length = len(tokens) * self._axes.cp.size
            if length > len(self.position):
                raise ValueError(f"a sequence of {length} exceeds the {len(self.position)} learned positions")
            if positions is None:
                rows = self._axes.cp.shard(self.position[:length], 0)
                hidden = hidden + self._axes.tp.sequence_shard(rows).unsqueeze(1)
            else:
                # The backward sums the rows of equal positions in the same order on any device.
                hidden = hidden + F.embedding(self._axes.tp.sequence_shard(positions), self.position)
        return hidden_dropout(hidden, self._dropout, randomness, "embedding", self._axes, self._kernels)


class GPTStage(nn.Module):
    """One virtual stage: contiguous layers, possibly none.

    The first stage begins with the embedding; the last ends with final norm, LM head and loss.
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
        """
        super().__init__()
        model = config.model
        self.dtype = builder.dtype
        tp = axes.tp
        self._axes = axes
        self._hidden_size = model.hidden_size
        rows_per_rank = model.padded_vocab_size(vocab_size, tp.size) // tp.size
        self._vocab_size = vocab_size
        self._kernels = builder.kernels
        self._num_valid = min(max(vocab_size - tp.rank * rows_per_rank, 0), rows_per_rank)
        is_tied = not model.untie_embeddings_and_output_weights
        self.embedding: GPTEmbedding | None = None
        if is_first:
            table = _vocab_table(model, "embedding.word", vocab_size, builder, is_tied)
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
        self.head: ColumnParallelLinear | None = None
        if is_last:
            self.final_norm = Norm(
                model.normalization, model.hidden_size, model.norm_epsilon, builder.under("final_norm")
            )
            name = "embedding.word" if is_tied else "head"
            table = _vocab_table(model, name, vocab_size, builder, is_tied)
            self.head = ColumnParallelLinear(table, None, tp)
        self._rotary = _rotary_table(config, builder)

    def hidden_shape(self, tokens: torch.Tensor) -> tuple[int, int, int]:
        """Shape [S(/t), B, H] of the activations that travel between stages, for this rank's tokens [B, S]."""
        size, length = tokens.shape
        tp = self._axes.tp
        return (length // tp.size if tp.sequence_parallel else length, size, self._hidden_size)

    def forward(
        self,
        hidden: torch.Tensor | None,
        micro_batch: MicroBatch,
        randomness: MicroBatchRandomness | None,
        compute_loss: bool = True,
        aux_loss_scale: float = 0.0,
    ) -> torch.Tensor:
        """Run the stage on one micro-batch.

        Collective: all tp, cp and ep ranks, and all dp x cp ranks if they shard the stage's weights.

        Args:
            hidden: the previous stage's result; None on the first stage.
            micro_batch: tokens, labels and loss mask of this rank's part of the sequences, on this stage's device.
            randomness: the random streams of dropout; None outside of training, which also disables token dropping by
                full experts.
            compute_loss: False returns logits on the last stage.
            aux_loss_scale: see ForwardPass.

        Returns:
            [S(/t), B, H], or on the last stage the float32 sum of the losses of the valid tokens, the same on all tp
            ranks. Without ``compute_loss`` this rank's logits [S, B, columns], without the columns of vocabulary
            padding: the last ranks may have fewer columns than the others, or none.
        """
        tokens = micro_batch.tokens.t()  # [S, B]
        positions = micro_batch.positions
        if positions is not None:
            positions = self._axes.cp.shard(positions.t(), 0)  # [S/c, B]
        if self.embedding is not None:
            hidden = self.embedding(tokens, randomness, positions)
        assert hidden is not None, "only the first stage takes no input from another stage"
        forward_pass = ForwardPass(
            self._rotary_of(tokens, positions),
            micro_batch.documents,
            randomness,
            aux_loss_scale,
            limits_experts=randomness is not None,
        )
        stream = Residual(hidden)
        for run in self._runs:
            if len(run) == 1:  # a layer recomputes itself
                stream = self.layers[run.start](stream, forward_pass)
            else:
                # Summed, so that recompute keeps one tensor instead of two.
                stream = Residual(recompute(partial(self._run_layers, run, forward_pass), stream.total()))
        if self.final_norm is None or self.head is None:
            return stream.total()
        logits: torch.Tensor = self.head(self.final_norm(*stream))  # [S, B, V/t]
        if not compute_loss:
            return logits[..., : self._num_valid]
        labels, tp = micro_batch.labels.t(), self._axes.tp
        losses = vocab_parallel_cross_entropy(logits, labels, self._vocab_size, tp, self._kernels)
        if micro_batch.loss_mask is not None:
            losses = losses * micro_batch.loss_mask.t()
        return losses.sum()

    def _run_layers(
        self, run: range, forward_pass: ForwardPass, hidden: torch.Tensor, *, needs_values: bool
    ) -> torch.Tensor:
        stream = Residual(hidden)
        for place in run:
            stream = self.layers[place](stream, forward_pass, needs_values or place < run[-1])
        return stream.total()

    def _rotary_of(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> RotaryTable | None:
        if self._rotary is None:
            return None
        cp = self._axes.cp
        table = self._rotary.first(len(tokens) * cp.size)
        if positions is not None:
            return table.at(positions)
        return RotaryTable(cp.shard(table.cos, 0), cp.shard(table.sin, 0))


def _vocab_table(
    model: ModelConfig, name: str, vocab_size: int, builder: ParameterBuilder, is_tied: bool
) -> nn.Parameter:
    known = builder.parameters.get(f"{name}.weight")
    if known is not None:
        return known
    return builder.under(name).weight(
        "weight",
        (model.padded_vocab_size(vocab_size, builder.mesh.tp), model.hidden_size),
        std=model.init_method_std,
        tp_dim=0,
        tied_over_stages=is_tied and len(builder.mesh.embedding_ranks) > 1,
        valid_rows=vocab_size,
    )


def _rotary_table(config: TrainConfig, builder: ParameterBuilder) -> RotaryTable | None:
    model = config.model
    if model.position_embedding_type != "rope":
        return None
    rotated = int(model.head_dim * model.rotary_percent)
    return RotaryTable.build(config.max_position_embeddings, rotated, model.rotary_base, builder.dtype, builder.device)
