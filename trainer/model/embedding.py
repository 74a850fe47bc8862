"""GPTEmbedding: from tokens to the first layer's input.

Legend: S this rank's part of the sequence, B micro-batch, H hidden, E width of the word table; ``/t`` = divided over
tp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.sections.scales import table_std
from trainer.config.train_config import TrainConfig
from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.context import ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.norm import Norm
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.embedding import VocabParallelEmbedding
from trainer.model.tensor_parallel.linear import ColumnParallelLinear


class GPTEmbedding(nn.Module):
    """Tokens [S, B] -> [S(/t), B, H].

    The word embedding, scaled, projected and normalized if the model says so, plus the learned embeddings of position
    and token type if any, then a norm if the model has one there, then dropout.
    """

    def __init__(
        self,
        config: TrainConfig,
        word_table: nn.Parameter,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        *,
        layer: int = 0,
    ):
        """Build the embedding around ``word_table`` [V/t, E]; ``layer`` is the layer it feeds, for dropout."""
        super().__init__()
        model = config.model
        self._axes = axes
        self._dropout, self._layer = model.hidden_dropout, layer
        self._kernels = builder.kernels
        self._scale: float | None = None
        if model.embedding_scale is not None:
            # Gemma rounds the factor to the dtype of the weights: sqrt(3072) = 55.43 is 55.5 in bfloat16.
            self._scale = float(torch.tensor(model.embedding_scale).to(builder.dtype))
        self.word = VocabParallelEmbedding(word_table, axes.tp)
        hidden = model.hidden_size
        self.project: ColumnParallelLinear | None = None
        if model.embedding_size is not None:
            self.project = build_projection(builder, (hidden, model.embedding_size), model.init_method_std)
        self.word_norm: Norm | None = None
        if model.embedding_layer_norm:
            # A LayerNorm also in a model of RMSNorm.
            self.word_norm = Norm(
                "LayerNorm", hidden, model.norm_epsilon, builder.under("word_norm"), adds_one=model.apply_layernorm_1p
            )
        self._first_position = model.position_embedding_offset
        self.position: nn.Parameter | None = None
        if model.position_embedding_type == "learned_absolute":
            self.position = builder.under("position").weight(
                "weight",
                (self._first_position + config.max_position_embeddings, hidden),
                std=table_std(model),
                is_normal=model.embedding_init_method_std is not None,
                on_sequence_shard=True,
                is_table=True,
            )
        self.token_type: nn.Parameter | None = None
        if model.token_types:
            shape = (model.token_types, hidden)
            self.token_type = builder.under("token_type").weight(
                "weight",
                shape,
                std=table_std(model),
                is_normal=model.embedding_init_method_std is not None,
                on_sequence_shard=True,
                is_table=True,
            )
        self.norm = Norm.of(model, builder.under("norm")) if model.has_embedding_norm else None

    def forward(
        self,
        tokens: torch.Tensor,
        randomness: MicroBatchRandomness | None,
        positions: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``positions`` [S, B]; None counts them along the sequence. ``token_types`` [S, B]; None: all are 0.

        Collective: all tp ranks, and all dp x cp ranks if they shard the stage's weights.

        Raises:
            ValueError: the sequence is longer than the table of learned positions.
        """
        hidden: torch.Tensor = self.word(tokens)  # [S(/t), B, E]
        if self._scale is not None:
            hidden = hidden * self._scale
        if self.project is not None:
            hidden = self.project(hidden)  # [S(/t), B, H]
        if self.word_norm is not None:
            hidden = self.word_norm(hidden)
        if self.position is not None:
            hidden = hidden + self._positions(self.position, len(tokens), positions)
        if self.token_type is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            hidden = hidden + F.embedding(self._axes.tp.sequence_shard(types), self.token_type)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden_dropout(hidden, self._dropout, randomness, "embedding", self._axes, self._kernels, self._layer)

    def _positions(self, table: torch.Tensor, own_length: int, positions: torch.Tensor | None) -> torch.Tensor:
        cp, tp, first = self._axes.cp, self._axes.tp, self._first_position
        length = own_length * cp.size
        if length > len(table) - first:
            raise ValueError(f"a sequence of {length} exceeds the {len(table) - first} learned positions")
        if positions is None:
            rows = cp.shard(table[first : first + length], 0)
            return tp.sequence_shard(rows).unsqueeze(1)
        # The backward sums the rows of equal positions in the same order on any device.
        return F.embedding(tp.sequence_shard(positions) + first, table)


def build_projection(builder: ParameterBuilder, shape: tuple[int, int], std: float) -> ColumnParallelLinear:
    """A matrix product with ``project.weight`` [out, in], which every tp rank computes whole, for its own tokens."""
    weight = builder.under("project").weight("weight", shape, std=std, on_sequence_shard=True)
    return ColumnParallelLinear(weight, None, TensorParallel())
