"""Micro-batches: which samples of the global batch this replica trains on, as tensors.

Legend: B micro-batch, S sequence.

Everything is a function of ``consumed_samples``, the number of samples that all replicas together have trained on, so
that a run resumes at its place on any layout. Sample i of a global batch belongs to the global micro-batch
``k = i // micro_batch_size``; replica ``k % dp`` runs it as its micro-batch ``k // dp``. Micro-batch k is therefore the
same samples for every dp, and its number serves to draw its dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.errors import DataError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")


@dataclass(frozen=True)
class Documents:
    """Where the documents of packed samples lie, so that attention stays within them.

    Attributes:
        bounds: for each sample of the micro-batch the positions at which a document begins, ascending from 0, and at
            the end the length of the sample.
    """

    bounds: tuple[tuple[int, ...], ...]
    _worked_out: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, key: Hashable, work: Callable[[], T]) -> T:
        """What ``work`` gives, which is called for the first of the layers, passes and replays that ask for ``key``."""
        if key not in self._worked_out:
            self._worked_out[key] = work()
        found: T = self._worked_out[key]
        return found


@dataclass(frozen=True)
class MicroBatch:
    """What one pass through the model takes. Every pipeline stage and tensor-parallel rank gets the same."""

    tokens: torch.Tensor
    """int64 [B, S]."""
    labels: torch.Tensor
    """int64 [B, S]: the token that follows each of ``tokens``."""
    loss_mask: torch.Tensor | None = None
    """float32 [B, S], 1 where the label counts; None: all count."""
    index: int = 0
    """Number of this micro-batch within the global batch, the same for every layout."""
    documents: Documents | None = None
    """Set where attention must not cross from one document to another."""
    positions: torch.Tensor | None = None
    """int64 [B, S], where they do not simply count along the sequence."""

    @property
    def valid_tokens(self) -> int:
        """How many labels count. On a GPU this waits for the mask: count before ``to``."""
        return self.labels.numel() if self.loss_mask is None else int(self.loss_mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``."""
        mask, positions = (None if part is None else part.to(device) for part in (self.loss_mask, self.positions))
        return replace(
            self, tokens=self.tokens.to(device), labels=self.labels.to(device), loss_mask=mask, positions=positions
        )


class Samples(Protocol):
    """An endless sequence of samples."""

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """The ``seq_length + 1`` tokens of sample ``number``."""


@dataclass(frozen=True)
class BatchShape:
    """How samples become the micro-batches of one replica."""

    micro_batch_size: int
    global_batch_size: int
    """A multiple of micro_batch_size x dp."""
    seq_length: int
    dp: int
    dp_rank: int


@dataclass(frozen=True)
class Packing:
    """What is done about the documents that share a sample.

    A document ends with its end-of-document token, as in Megatron-LM's get_ltor_masks_and_position_ids
    (megatron/training/utils.py): what follows belongs to the next one.
    """

    end: int
    """The token that ends a document."""
    mask_loss: bool = False
    """Positions whose input is ``end`` do not count in the loss."""
    separate_attention: bool = False
    """Attention stays within a document."""
    restart_positions: bool = False
    """Positions begin anew with each document."""

    def apply(self, batch: MicroBatch) -> MicroBatch:
        """``batch`` with its loss mask, documents and positions."""
        is_end = batch.tokens == self.end
        if self.mask_loss:
            mask = (~is_end).float()
            batch = replace(batch, loss_mask=mask if batch.loss_mask is None else mask * batch.loss_mask)
        if self.separate_attention:
            batch = replace(batch, documents=Documents(tuple(_document_bounds(row.numpy()) for row in is_end)))
        if self.restart_positions:
            # The last position so far at which a document begins; a document begins after an end.
            places = torch.arange(is_end.shape[1])
            begins = torch.zeros_like(batch.tokens)
            begins[:, 1:] = torch.where(is_end[:, :-1], places[1:], 0)
            batch = replace(batch, positions=places - begins.cummax(dim=1).values)
        return batch


def _document_bounds(is_end: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    length = len(is_end)
    return (0, *(int(end) + 1 for end in np.flatnonzero(is_end[:-1])), length)


class TrainData:
    """The samples of a run, by split. Made by trainer.data.build.build_data."""

    def __init__(
        self,
        samples: Mapping[Split, Samples],
        vocab_size: int,
        shape: BatchShape,
        packing: Packing | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Wrap ``samples``.

        Args:
            samples: the splits that there are.
            vocab_size: number of token ids, not padded.
            shape: batch sizes and this replica's place.
            packing: what is done about documents; None: nothing.
            notes: one line each for what a reader of the log should know; rank 0 prints them.
        """
        self.vocab_size = vocab_size
        self.notes = notes
        self._samples = dict(samples)
        self._shape = shape
        self._packing = packing

    @property
    def masks_loss(self) -> bool:
        """Whether some labels do not count, so that the tokens of a global batch have to be counted."""
        return self._packing is not None and self._packing.mask_loss

    def has(self, split: Split) -> bool:
        """Whether there is anything to read in ``split``."""
        return split in self._samples

    def micro_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """This replica's micro-batches of the global batch that starts at ``consumed_samples``.

        Raises:
            DataError: the data holds a token outside the vocabulary.
        """
        shape = self._shape
        count = shape.global_batch_size // shape.micro_batch_size
        return [
            self._micro_batch(split, consumed_samples + index * shape.micro_batch_size, index)
            for index in range(shape.dp_rank, count, shape.dp)
        ]

    def _micro_batch(self, split: Split, first: int, index: int) -> MicroBatch:
        samples = self._samples[split]
        windows = np.stack([samples.sample(first + row) for row in range(self._shape.micro_batch_size)])  # [B, S + 1]
        if windows.max() >= self.vocab_size or windows.min() < 0:
            wrong = windows[(windows >= self.vocab_size) | (windows < 0)][0]
            raise DataError(
                f"data.data_path: sample {first} and on hold token {wrong}, but model.vocab_size is {self.vocab_size}; "
                "set it to the vocabulary that the data was tokenized with"
            )
        tokens, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (windows[:, :-1], windows[:, 1:]))
        batch = MicroBatch(tokens, labels, index=index)
        return batch if self._packing is None else self._packing.apply(batch)
