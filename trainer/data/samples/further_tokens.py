"""Tokens and labels of multi-token prediction, shifted along whole samples.

Legend: B micro-batch, S sequence, k prediction depth.
DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2: at depth k, position i reads token i + k and predicts token i + k + 1.
The last k positions of a sample have nothing to predict, nor have the last k of a document that attention stays within,
as in Megatron-LM's roll_tensor (megatron/core/transformer/multi_token_prediction.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.data.samples.batches import MicroBatch


@dataclass(frozen=True)
class FurtherTokens:
    """Input and labels of one prediction depth.

    Attributes:
        tokens: int64 [B, S], the token that each position reads; 0 beyond the end of the sample.
        labels: int64 [B, S], the token that it predicts; 0 beyond the end.
        loss_mask: [B, S], 1 where the label counts in the loss of this depth.
        weight: scalar, labels that count in the loss of the next token, for each label that counts at this depth.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    weight: Tensor

    def with_parts(self, part: Callable[[Tensor], Tensor]) -> FurtherTokens:
        """The same for a part of the positions; ``weight`` stays that of whole samples."""
        return replace(self, tokens=part(self.tokens), labels=part(self.labels), loss_mask=part(self.loss_mask))


def with_further_tokens(batch: MicroBatch, depths: int) -> MicroBatch:
    """``batch``, of whole samples, with the tokens of ``depths`` prediction depths. No synchronisation with a GPU."""
    return replace(batch, further=tuple(_at_depth(batch, depth) for depth in range(1, depths + 1)))


def _at_depth(batch: MicroBatch, depth: int) -> FurtherTokens:
    every = batch.labels.new_ones(batch.labels.shape) if batch.loss_mask is None else batch.loss_mask
    mask = shifted(every, depth)
    if batch.documents is not None:
        positions = batch.documents.positions(batch.tokens.device)
        mask = mask * (shifted(positions, depth) - positions == depth)
    weight = every.sum().float() / mask.sum().clamp(min=1)
    return FurtherTokens(shifted(batch.tokens, depth), shifted(batch.labels, depth), mask, weight)


def shifted(values: Tensor, depth: int) -> Tensor:
    """[B, S] with the value of position i + ``depth`` at position i, and 0 beyond the end."""
    return F.pad(values[:, depth:], (0, min(depth, values.shape[1])))
