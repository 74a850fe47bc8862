"""Multi-token prediction: further layers after the last one, each of which predicts one token more.

Legend: S this rank's part of the sequence, B micro-batch, H hidden, D prediction depths; ``/t`` = divided over tp.
DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2. At depth k, with the output h of the depth before:

    h' = merge [norm(embedding of token i + k); norm(h)]        equation 21
    h  = norm(layer(h'))                                        equation 22
    p  = softmax(head(h)), the prediction of token i + k + 1    equation 23
    loss = main loss + factor / D * sum_k loss_k                equations 24 and 25

The embedding's half comes first in ``merge``, and h is taken after a norm, at depth 0 the model's final norm: so do the
published weights of DeepSeek-V3 and Megatron-LM (megatron/core/transformer/multi_token_prediction.py). Word table and
output table are the model's own. In each micro-batch, loss_k is the mean over the labels of its depth, times the
number of labels of the main loss, as in Megatron-LM's --calculate-per-token-loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.config.sections.scales import matrix_std
from trainer.data.samples.micro_batch import MicroBatch
from trainer.model.block import Block
from trainer.model.embedding import GPTEmbedding
from trainer.model.head import GPTHead
from trainer.model.norm import Norm, Residual
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.linear import ColumnParallelLinear

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig
    from trainer.data.samples.micro_batch import FurtherTokens
    from trainer.model.context import ForwardPass, ParallelAxes
    from trainer.model.sharding import ParameterBuilder


class PredictionLayer(nn.Module):
    """The parts of one depth that are its own: three norms, a projection, and a layer like the model's last one."""

    def __init__(
        self, model: ModelConfig, layer: int, builder: ParameterBuilder, axes: ParallelAxes, recomputed: frozenset[str]
    ):
        """Build the layer.

        Args:
            model: shape of the model.
            layer: number of the layer, counted on from the layers of the model.
            builder: makes the parameters.
            axes: the axes along which the layer is divided.
            recomputed: see Block.
        """
        super().__init__()
        width = model.hidden_size
        self.embedding_norm = Norm.of(model, builder.under("embedding_norm"))
        self.hidden_norm = Norm.of(model, builder.under("hidden_norm"))
        # Every tp rank computes the product whole, for its own tokens.
        merge = builder.under("merge").weight(
            "weight", (width, 2 * width), std=matrix_std(model), on_sequence_shard=True
        )
        self.merge = ColumnParallelLinear(merge, None, TensorParallel())
        self.block = Block(model, layer, builder, axes, recomputed)
        self.final_norm = Norm.of(model, builder.under("final_norm"))

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        """The next depth's [S(/t), B, H] from that of the depth before and the embedding of the further token.

        Collective: all ranks of the layer's axes.
        """
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        stream: Residual = self.block(Residual(self.merge(both)), forward_pass)
        normed: torch.Tensor = self.final_norm(*stream)
        return normed


class FurtherPredictions(nn.Module):
    """The losses of all depths, with the tables that they share with the model.

    The tables are apart from the layers, so that each layer can be sharded by itself.

    Attributes:
        totals: float64 [D, 2], sum of the token losses of each depth and number of their labels, of this rank's part
            of the sequences, since the last ``take_losses``.
    """

    totals: torch.Tensor

    def __init__(
        self,
        config: TrainConfig,
        tables: tuple[nn.Parameter, nn.Parameter],
        vocab_size: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
    ):
        """Build it around the model's word table and output table."""
        super().__init__()
        model, (word, output) = config.model, tables
        depths = model.mtp_num_layers
        # Modules of their own for each depth: each gives its tables one gradient per micro-batch.
        self.embeddings = nn.ModuleList(
            GPTEmbedding(config, word, builder.under("embedding"), axes, layer=model.num_layers + depth)
            for depth in range(depths)
        )
        self.heads = nn.ModuleList(
            GPTHead(model, output, vocab_size, builder.under("head"), axes.tp, chunk_size=config.training.chunk_of_loss)
            for _ in range(depths)
        )
        self._factor = model.mtp_loss_scaling_factor / depths
        totals = torch.zeros(depths, 2, dtype=torch.float64, device=builder.device)
        self.register_buffer("totals", totals, persistent=False)

    def forward(
        self,
        layers: Iterable[nn.Module],
        hidden: torch.Tensor,
        further: Sequence[FurtherTokens],
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        """The float32 sum of all depths' losses, with their factor.

        Collective: all ranks of the layers' axes.

        Args:
            layers: the PredictionLayer of each depth.
            hidden: [S(/t), B, H], after the model's final norm.
            further: input and labels of each depth, of this rank's part of the sequences.
            forward_pass: that of the model's layers.
        """
        losses = []
        for depth, (layer, one) in enumerate(zip(layers, further, strict=True)):
            embedded = self.embeddings[depth](one.tokens.t(), forward_pass.randomness)
            hidden = layer(hidden, embedded, forward_pass)
            loss = self.heads[depth](hidden, MicroBatch(one.tokens, one.labels, one.loss_mask))
            self.totals[depth] += torch.stack((loss.detach().double(), one.loss_mask.sum().double()))
            losses.append(loss * one.weight)
        return torch.stack(losses).sum() * self._factor


def prediction_layers(
    config: TrainConfig, builder: ParameterBuilder, axes: ParallelAxes, recomputed: frozenset[str]
) -> Iterator[PredictionLayer]:
    """The layers of all depths, numbered on from the layers of the model.

    With full recompute by the method ``uniform``, backward recomputes each of them; ``block`` counts only the layers
    of the model.

    Args:
        config: the whole training config.
        builder: makes the parameters.
        axes: the axes along which the layers are divided.
        recomputed: parts of every layer that backward recomputes, if recompute is selective.
    """
    model = config.model
    if config.training.recompute_method == "uniform":
        recomputed = frozenset({"layer"})
    for layer in range(model.num_layers, model.num_layers + model.mtp_num_layers):
        yield PredictionLayer(model, layer, builder.under(f"layers.{layer}"), axes, recomputed)


def take_losses(stages: Iterable[nn.Module]) -> list[list[float]]:
    """Sum of the token losses of each depth and number of their labels since the last call; empty without depths.

    On a GPU this synchronizes.
    """
    for predictions in (module for stage in stages for module in stage.modules()):
        if isinstance(predictions, FurtherPredictions):
            totals: list[list[float]] = predictions.totals.tolist()
            predictions.totals.zero_()
            return totals
    return []
