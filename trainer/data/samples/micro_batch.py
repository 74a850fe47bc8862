"""MicroBatch: input of one pass through the model.

Legend: B micro-batch, S sequence, E encoder's sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from trainer.data.samples.document_places import Documents


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


@dataclass(frozen=True)
class MicroBatch:
    """Input of one pass through the model. Each model takes the tensors that it needs.

    All pipeline stages and tensor-parallel ranks get the same micro-batch.
    """

    tokens: torch.Tensor
    """int64 [B, S]."""
    labels: torch.Tensor
    """int64 [B, S]: the next token of each of ``tokens``; of a masked language model the hidden token."""
    loss_mask: torch.Tensor | None = None
    """[B, S], bool or numeric: 1 where the label counts in the loss; None: all labels count."""
    index: int = 0
    """Number of this micro-batch within the global batch, the same for every parallel layout."""
    documents: Documents | None = None
    """Documents that attention must stay within; None: no restriction."""
    restarts: Documents | None = None
    """Documents at which positions restart; None: no restart."""
    padding_mask: torch.Tensor | None = None
    """bool [B, S]: True for tokens that attention sees, at least one in each sample; None: no padding."""
    token_types: torch.Tensor | None = None
    """int64 [B, S]: part of the sample that each token belongs to (BERT); None: all 0."""
    sample_labels: torch.Tensor | None = None
    """int64 [B]: label of each whole sample, such as the order of its parts (BERT); None: samples have no label."""
    encoder_tokens: torch.Tensor | None = None
    """int64 [B, E]: of a model with encoder and decoder, whose ``tokens`` are the decoder's."""
    encoder_mask: torch.Tensor | None = None
    """bool [B, E]: False for padding of ``encoder_tokens``."""
    further: tuple[FurtherTokens, ...] = ()
    """Input and labels of each depth of multi-token prediction; only in training, on the stage with the loss."""

    @property
    def positions(self) -> torch.Tensor | None:
        """Position ids, int32 [B, S], on the device of ``tokens``.

        None: consecutive along the sequence.
        """
        return None if self.restarts is None else self.restarts.positions(self.tokens.device)

    @property
    def valid_tokens(self) -> int:
        """Number of labels that count. On a GPU this synchronizes: count before ``to``."""
        return self.labels.numel() if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def loss_counts(self) -> dict[str, int]:
        """Name of each term of the loss, in the model's order, and the number of labels that count in it.

        The loss is the sum of the terms, each a mean over the labels of the global batch.
        """
        counts = {"lm_loss": self.valid_tokens}
        if self.sample_labels is not None:
            counts["sop_loss"] = len(self.sample_labels)
        return counts

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to ``device``; asynchronous from pinned memory to a GPU."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """Copy to pinned memory."""
        if self.restarts is not None:
            self.restarts.pin()
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)
