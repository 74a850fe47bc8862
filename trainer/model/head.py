"""Heads: from the last layer's output to logits or losses.

Legend: S this rank's part of the sequence, B micro-batch, H hidden, E width of the word table, V padded vocabulary;
``/t`` = divided over tp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import logits_divisor
from trainer.model.embedding import build_projection
from trainer.model.norm import Norm
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.chunked_loss import chunked_losses
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.cross_entropy import gather_vocabulary, vocab_parallel_cross_entropy
from trainer.model.tensor_parallel.linear import ColumnParallelLinear
from trainer.ops.activation import ACTIVATION, Activation
from trainer.ops.loss_terms import LossTerms

if TYPE_CHECKING:
    from trainer.data.samples.micro_batch import MicroBatch


TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [N, V] of N tokens, without padding columns; labels [N]) -> losses [N]."""


class GPTHead(nn.Module):
    """[S(/t), B, H] -> sum of the losses of labels, or without labels the logits [S, B, V/t]."""

    def __init__(
        self,
        model: ModelConfig,
        table: nn.Parameter,
        vocab_size: int,
        builder: ParameterBuilder,
        tp: TensorParallel,
        token_loss: TokenLoss | None = None,
        chunk_size: int | None = None,
    ):
        """Build the head around ``table`` [V/t, E].

        Args:
            model: shape of the model.
            table: the output table, which may be the word table.
            vocab_size: rows of the vocabulary without padding.
            builder: makes the bias and the projection.
            tp: the tp axis.
            token_loss: the user's loss; None: cross entropy.
            chunk_size: tokens whose logits the loss holds at once; None: all of a micro-batch.
        """
        super().__init__()
        self._token_loss, self._chunk_size = token_loss, chunk_size
        self._tp = tp
        self._kernels = builder.kernels
        self._vocab_size = vocab_size
        rows_per_rank = len(table)
        self.num_valid = min(max(vocab_size - tp.rank * rows_per_rank, 0), rows_per_rank)
        """This rank's columns of the vocabulary; padding follows them."""
        self._scaling = logits_divisor(model)
        self._terms = LossTerms(z_loss=model.z_loss_coeff, softcap=model.final_logit_softcapping)
        self.project: ColumnParallelLinear | None = None
        if model.embedding_size is not None:
            shape = (model.embedding_size, model.hidden_size)
            self.project = build_projection(builder, shape, model.init_method_std)
        bias = None
        if model.has_head_bias:
            bias = builder.vector(
                "bias",
                (rows_per_rank * tp.size,),
                value=0.0,
                tp_dim=0,
                # All tokens of a batch reach each rank's part of the vocabulary.
                on_sequence_shard=False,
                valid_rows=vocab_size,
            )
        self.output = ColumnParallelLinear(table, bias, tp)

    def forward(self, hidden: torch.Tensor, micro_batch: MicroBatch | None = None) -> torch.Tensor:
        """Collective: all tp ranks.

        Args:
            hidden: [S(/t), B, H], after the final norm.
            micro_batch: labels and loss mask; None: logits only.

        Returns:
            The sum of the losses, float32, the same on all tp ranks; without ``micro_batch`` this rank's logits.
        """
        if self.project is not None:
            hidden = self.project(hidden)  # [S(/t), B, E]
        if self._scaling != 1.0:
            hidden = hidden / self._scaling  # smaller than the logits, which are linear in it
        if micro_batch is None:
            logits: torch.Tensor = self.output(hidden)  # [S, B, V/t]
            return self._capped(logits)
        labels, mask = micro_batch.labels.t(), micro_batch.loss_mask
        if self._chunk_size is None:
            losses = self._losses(self.output(hidden), labels)
        else:
            losses = chunked_losses(self.output, hidden, labels, self._losses, self._chunk_size, self._tp)
        return (losses if mask is None else losses * mask.t()).sum()

    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses [S, B] or [N], float32, from this rank's logits with another dim V/t. Collective: all tp ranks."""
        if self._token_loss is not None:
            return self._own_losses(self._token_loss, logits, labels)
        return vocab_parallel_cross_entropy(logits, labels, self._vocab_size, self._tp, self._kernels, self._terms)

    def _own_losses(self, token_loss: TokenLoss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The user's losses [S, B] or [N], float32, from this rank's logits."""
        whole = gather_vocabulary(self._capped(logits), self._vocab_size, self._tp)  # [..., V]
        return token_loss(whole.flatten(0, -2), labels.flatten()).float().view(labels.shape)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self._terms.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class BertHead(GPTHead):
    """[S, B, H] -> sums of the losses of masked tokens and of whole samples, or the logits [S, B, V/t] of tokens.

    Tokens pass a product, the activation and a norm before the output layer. The binary head reads the first token of
    each sample, through a product and tanh. Devlin et al. 2018 (arXiv:1810.04805), section 3.1 and appendix A.1;
    order of the parts as the label: Lan et al. 2019 (arXiv:1909.11942), section 3.1.
    """

    def __init__(
        self,
        model: ModelConfig,
        table: nn.Parameter,
        vocab_size: int,
        builder: ParameterBuilder,
        tp: TensorParallel,
        chunk_size: int | None = None,
    ):
        """See GPTHead."""
        super().__init__(model, table, vocab_size, builder, tp, chunk_size=chunk_size)
        hidden, std = model.hidden_size, model.init_method_std
        self.transform = _whole_linear(builder.under("transform"), (hidden, hidden), std)
        self._activation: Activation = model.activation
        self.norm = Norm.of(model, builder.under("norm"))
        self.pooler: ColumnParallelLinear | None = None
        self.binary: ColumnParallelLinear | None = None
        if model.bert_binary_head:
            self.pooler = _whole_linear(builder.under("pooler"), (hidden, hidden), std)
            self.binary = _whole_linear(builder.under("binary"), (2, hidden), std)

    def forward(self, hidden: torch.Tensor, micro_batch: MicroBatch | None = None) -> torch.Tensor:
        """Collective: all tp ranks.

        Args:
            hidden: [S, B, H].
            micro_batch: labels, loss mask and the labels of samples; None: logits of tokens only.

        Returns:
            The sums [2] of the losses of tokens and samples, float32, the same on all tp ranks; without a binary head
            the first alone. Without ``micro_batch`` this rank's logits.

        Raises:
            ValueError: the samples have no labels, but the model has a binary head.
        """
        activate = self._kernels[ACTIVATION]
        transformed = activate(self.transform(hidden), None, None, self._activation, False)
        tokens = super().forward(self.norm(transformed), micro_batch)
        if micro_batch is None or self.pooler is None or self.binary is None:
            return tokens
        if micro_batch.sample_labels is None:
            raise ValueError("a model with a binary head needs a label for each sample")
        pooled = torch.tanh(self.pooler(hidden[0]))  # [B, H]
        scores = self.binary(pooled)  # [B, 2]
        samples = F.cross_entropy(scores.float(), micro_batch.sample_labels, reduction="sum")
        return torch.stack((tokens, samples))


def _whole_linear(builder: ParameterBuilder, shape: tuple[int, int], std: float) -> ColumnParallelLinear:
    """A matrix product with bias that every tp rank computes whole."""
    weight, bias = (
        builder.weight("weight", shape, std=std),
        builder.vector("bias", shape[:1], value=0.0, on_sequence_shard=False),
    )
    return ColumnParallelLinear(weight, bias, TensorParallel())
