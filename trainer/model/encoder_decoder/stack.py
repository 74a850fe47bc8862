"""Stack: the encoder or the decoder, from tokens to normed hidden states.

Legend: S sequence, B micro-batch, H hidden, A heads; ``/t`` = divided over tp.
Raffel et al. 2020, T5 (arXiv:1910.10683), section 2.1. Dropout is at the stack's input and, if the model says so, its
output, on every residual branch and on the attention weights, but not inside the feed-forward part.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from trainer.config.train_config import TrainConfig
from trainer.distributed.random_streams import DropoutSite
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.encoder_decoder.layer import Layer, Source
from trainer.model.encoder_decoder.relative_bias import RelativeBias
from trainer.model.norm import Norm, Residual
from trainer.model.recompute import RecomputePlan, recompute
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.embedding import VocabParallelEmbedding


class Tables(NamedTuple):
    """Tables of both stacks.

    Attributes:
        word: [V/t, H].
        position: [P, H] of learned positions, as many as the longest sequence or more; None: no such table.
    """

    word: nn.Parameter
    position: nn.Parameter | None


class Stack(nn.Module):
    """Tokens [S, B] -> [S(/t), B, H]."""

    def __init__(
        self,
        config: TrainConfig,
        tables: Tables,
        numbers: range,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        *,
        is_decoder: bool,
    ):
        """Build the stack.

        Args:
            config: the whole training config.
            tables: shared by both stacks.
            numbers: numbers of the layers, counted over encoder and decoder.
            builder: makes the parameters.
            axes: the axes along which the layers are divided.
            is_decoder: see Layer.
        """
        super().__init__()
        model = config.model
        self._first = numbers.start
        self._axes = axes
        self._dropout = model.hidden_dropout
        self._drops_output = model.stack_output_dropout
        self._kernels = builder.kernels
        self.word = VocabParallelEmbedding(tables.word, axes.tp)
        self.position = tables.position
        self.relative_bias: RelativeBias | None = None
        if model.position_embedding_type == "relative":
            self.relative_bias = RelativeBias(model, builder.under("relative_bias"), causal=is_decoder)
        plan = RecomputePlan.build(config.training, len(numbers))
        self._groups = plan.groups
        self._runs = plan.runs(len(numbers))
        self.layers = nn.ModuleList(
            Layer(model, number, builder.under(f"layers.{place}"), axes, plan.modules, is_decoder=is_decoder)
            for place, number in enumerate(numbers)
        )
        self.final_norm = Norm.of(model, builder.under("final_norm"))

    def forward(
        self,
        tokens: torch.Tensor,
        forward_pass: ForwardPass,
        mask: torch.Tensor | None = None,
        source: Source | None = None,
    ) -> torch.Tensor:
        """Collective: all tp ranks.

        Args:
            tokens: [S, B].
            forward_pass: randomness and rotation.
            mask: [B, S], False for padding, which no position attends to; None: no padding, or causal attention with
                the padding at the end.
            source: the encoder's output, for the decoder.
        """
        bias: torch.Tensor | None = None
        if self.relative_bias is None:
            forward_pass = replace(forward_pass, key_mask=mask)
        else:
            bias = self.relative_bias(len(tokens), len(tokens))  # [A/t, S, S]
            if mask is not None:
                # Once for all layers, instead of in each of them.
                bias = bias.masked_fill(~mask[:, None, None], -torch.inf)  # [B, A/t, S, S]
        stream = Residual(self._dropped(self._embedded(tokens), forward_pass, "embedding"))
        for run in self._runs:
            if run in self._groups:
                function = partial(self._run_layers, run, forward_pass, None if source is None else source.mask)
                # Gradients leave a recomputed part through its arguments only.
                further = (bias, None if source is None else source.encoded)
                stream = Residual(recompute(function, stream.total(), *(each for each in further if each is not None)))
            else:
                stream = self.layers[run.start](stream, forward_pass, bias, source)
        normed: torch.Tensor = self.final_norm(*stream)
        return self._dropped(normed, forward_pass, "stack_output") if self._drops_output else normed

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.word(tokens)  # [S(/t), B, H]
        if self.position is None:
            return hidden
        return hidden + self._axes.tp.sequence_shard(self.position[: len(tokens)]).unsqueeze(1)

    def _run_layers(
        self,
        run: range,
        forward_pass: ForwardPass,
        mask: torch.Tensor | None,
        hidden: torch.Tensor,
        *further: torch.Tensor,
        needs_values: bool,
    ) -> torch.Tensor:
        """``further``: the position bias if the model has one; then for the decoder the encoder's output."""
        bias = None if self.relative_bias is None else further[0]
        source = None if mask is None else Source(further[-1], mask)
        stream = Residual(hidden)
        for place in run:
            stream = self.layers[place](stream, forward_pass, bias, source, needs_values or place < run[-1])
        return stream.total()

    def _dropped(self, hidden: torch.Tensor, forward_pass: ForwardPass, site: DropoutSite) -> torch.Tensor:
        randomness = forward_pass.randomness
        return hidden_dropout(hidden, self._dropout, randomness, site, self._axes, self._kernels, self._first)
