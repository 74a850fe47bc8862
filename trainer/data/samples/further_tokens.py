"""Tokens and labels of multi-token prediction, shifted along whole samples.

Legend: B micro-batch, S sequence, k prediction depth.
DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2: at depth k, position i reads token i + k and predicts token i + k + 1.
The last k positions of a sample have nothing to predict, nor have the last k of a document that attention stays within,
as in Megatron-LM's roll_tensor (megatron/core/transformer/multi_token_prediction.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from trainer.data.samples.micro_batch import FurtherTokens, MicroBatch


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
