"""Micro-batches of this replica as tensors.

Legend: B micro-batch, S sequence.

All batches are functions of ``consumed_samples``, the number of samples that all replicas together have trained on, so
that a run resumes at its position on any parallel layout. Sample i of a global batch belongs to the global micro-batch
``k = i // micro_batch_size``, which replica ``k % dp`` runs as its micro-batch ``k // dp``. So micro-batch k has the
same samples for every dp, and its number addresses its dropout stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from trainer.config.sections.batch_sizes import BatchSizes
from trainer.data.errors import DataError
from trainer.data.samples.document_places import Bounds, DocumentEnds
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.samples.windows import Tokens, read_windows

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class PackedSample:
    """A sample of whole documents and padding; attention stays within each."""

    tokens: Tokens
    """[S]."""
    labels: Tokens
    """[S]: the next token in the document."""
    counts: npt.NDArray[np.bool_]
    """[S]: True if the label counts in the loss."""
    bounds: Bounds
    """Bounds of the documents and the padding; see Documents.bounds."""


@dataclass(frozen=True)
class MaskedWindow:
    """A window of tokens, of which some labels do not count."""

    tokens: Tokens
    """[S + 1]."""
    counts: npt.NDArray[np.bool_]
    """[S]: True if the label counts in the loss."""


Sample = Tokens | PackedSample | MaskedWindow
"""A window of ``seq_length + 1`` tokens, a packed sample, or a window with labels that do not count."""


class Samples(Protocol):
    """An endless sequence of samples of one type."""

    def sample(self, number: int) -> Sample:
        """Read sample ``number``."""


class Stream(Protocol):
    """Text that is tokenized during training; see trainer.data.streaming.stream."""

    def state(self, consumed_samples: int) -> dict[str, Any]:
        """Plain values for a checkpoint, from which training resumes at this sample."""

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Resume from the state of a checkpoint."""

    def close(self) -> None:
        """Stop the worker processes."""


class SampleOrder(Protocol):
    """Resumable order of the training samples; see trainer.data.samples.continuation."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""

    def restore(self, state: Mapping[str, Any], consumed_samples: int) -> str | None:
        """Resume from the state of a checkpoint.

        Returns a line about changes, None without any.
        """


@dataclass(frozen=True)
class BatchShape:
    """Batch sizes, and this replica's place among the replicas."""

    micro_batch_size: int
    global_batch_size: int
    """A multiple of micro_batch_size x dp."""
    seq_length: int
    dp: int
    dp_rank: int
    sizes: BatchSizes | None = None
    """Of the batches of the train split, multiples too; None: every batch has global_batch_size."""

    def batch_size(self, split: Split, consumed_samples: int) -> int:
        """Samples of the global batch that starts at ``consumed_samples``."""
        return self.sizes.at(consumed_samples) if self.sizes and split == "train" else self.global_batch_size

    def micro_batches(self, count: int) -> range:
        """Numbers, within the global batch, of the ``count`` micro-batches of this replica."""
        return range(self.dp_rank, count * self.dp, self.dp)


@dataclass(frozen=True)
class Packing:
    """Rules for the documents that share a sample.

    A document ends with its end-of-document token, as in Megatron-LM's get_ltor_masks_and_position_ids
    (megatron/training/utils.py): the tokens that follow belong to the next document.
    """

    end: int
    """End-of-document token."""
    mask_loss: bool = False
    """Exclude positions whose input is ``end`` from the loss."""
    separate_attention: bool = False
    """Restrict attention to the document."""
    restart_positions: bool = False
    """Restart positions at each document."""

    def apply(self, batch: MicroBatch) -> MicroBatch:
        """Add loss mask and documents to ``batch``, which must be on the CPU."""
        counts, ends = self.places_of(batch.tokens.numpy() == self.end, batch.tokens.shape[1])
        documents = None if ends is None else ends.documents(len(batch.tokens))[0]
        mask = batch.loss_mask
        if counts is not None:
            mask = torch.from_numpy(counts) if mask is None else mask * torch.from_numpy(counts)
        return replace(
            batch,
            loss_mask=mask,
            documents=documents if self.separate_attention else batch.documents,
            restarts=documents if self.restart_positions else batch.restarts,
        )

    def places_of(self, is_end: npt.NDArray[np.bool_], length: int) -> DocumentPlaces:
        """Loss mask and document ends of samples, as far as the rules need them.

        Args:
            is_end: [N, ``length`` or more], True if a token is ``end``; the caller must not use it again.
            length: S.
        """
        counts = ~is_end[:, :length] if self.mask_loss else None
        if not (self.separate_attention or self.restart_positions):
            return DocumentPlaces(counts, None)
        return DocumentPlaces(counts, DocumentEnds(is_end, length))


class DocumentPlaces(NamedTuple):
    """Loss mask and document ends of N samples; None if not needed."""

    counts: npt.NDArray[np.bool_] | None = None
    """[N, S]: True if the label counts in the loss."""
    ends: DocumentEnds | None = None


class TrainData:
    """Samples of a run, by split, built by trainer.data.loading.build.build_data."""

    def __init__(
        self,
        samples: Mapping[Split, Samples],
        vocab_size: int,
        shape: BatchShape,
        packing: Packing | None = None,
        notes: tuple[str, ...] = (),
        masks_loss: bool = False,
        stream: Stream | None = None,
        order: SampleOrder | None = None,
        has_masks: bool = False,
    ) -> None:
        """Wrap ``samples``.

        Args:
            samples: samples of each existing split.
            vocab_size: number of token ids, without padding.
            shape: batch sizes and this replica's place.
            packing: rules for documents; None: no rules.
            notes: lines for the log, which rank 0 prints.
            masks_loss: True if the samples are packed documents, which have their own loss masks.
            stream: source of streamed text, whose samples are windows; None: prepared data.
            order: order of the training samples, which is part of checkpoints; None: no state.
            has_masks: True if the samples are MaskedWindow.
        """
        self.vocab_size = vocab_size
        self.notes = notes
        self.stream = stream
        self._samples = dict(samples)
        self._shape = shape
        self._packing = packing
        self._order = order
        self._is_packed = masks_loss
        self._has_masks = has_masks
        self._masks_loss = masks_loss or has_masks or (packing is not None and packing.mask_loss)
        self._separates = masks_loss or (packing is not None and packing.separate_attention)
        self._restarts = masks_loss or (packing is not None and packing.restart_positions)

    @property
    def masks_loss(self) -> bool:
        """True if some labels may not count, so that valid tokens must be counted."""
        return self._masks_loss

    def state(self, consumed_samples: int) -> dict[str, Any] | None:
        """Plain values for a checkpoint at this sample; None: ``consumed_samples`` is sufficient."""
        if self.stream is not None:
            return self.stream.state(consumed_samples)
        return None if self._order is None else self._order.state()

    def restore(self, state: Mapping[str, Any] | None, consumed_samples: int) -> None:
        """Resume from the state of a checkpoint; changes since then are added to ``notes``.

        Raises:
            DataError: the order of the samples cannot be resumed.
        """
        if self.stream is not None:
            self.stream.restore(state)
        elif self._order is not None and state is not None:
            changed = self._order.restore(state, consumed_samples)
            self.notes += () if changed is None else (changed,)

    def has(self, split: Split) -> bool:
        """True if ``split`` has samples."""
        return split in self._samples

    @property
    def has_documents(self) -> bool:
        """True if every pipeline stage needs the batches, for document ends or padding."""
        return self._separates or self._restarts

    def batch_size(self, split: Split, consumed_samples: int) -> int:
        """Samples of the global batch that starts at ``consumed_samples``."""
        return self._shape.batch_size(split, consumed_samples)

    def windows_shape(self, split: Split, consumed_samples: int) -> tuple[int, int, int]:
        """Shape of ``windows``: [micro-batches of this replica, B, S + 1]."""
        size = self._shape.micro_batch_size
        count = self.batch_size(split, consumed_samples) // (size * self._shape.dp)
        return (count, size, self._shape.seq_length + 1)

    def _indexes(self, split: Split, consumed_samples: int) -> range:
        """Numbers, within the global batch, of this replica's micro-batches."""
        return self._shape.micro_batches(self.windows_shape(split, consumed_samples)[0])

    def _numbers(self, split: Split, consumed_samples: int) -> npt.NDArray[np.int64]:
        """Numbers of the samples of this replica's micro-batches."""
        size = self._shape.micro_batch_size
        indexes = np.array(self._indexes(split, consumed_samples), np.int64)
        return consumed_samples + (indexes[:, None] * size + np.arange(size)).ravel()

    def micro_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """Micro-batches of this replica of the global batch that starts at ``consumed_samples``.

        Raises:
            DataError: the data has a token outside the vocabulary.
        """
        numbers = self._numbers(split, consumed_samples)
        if self._is_packed:
            packed = [cast(PackedSample, self._samples[split].sample(number)) for number in numbers.tolist()]
            return self._of_packed(packed, consumed_samples)
        if self._has_masks:
            masked = [cast(MaskedWindow, self._samples[split].sample(number)) for number in numbers.tolist()]
            return self._of_whole(np.stack([one.tokens for one in masked]), np.stack([one.counts for one in masked]))
        return self._of_whole(self._checked(read_windows(self._samples[split], numbers), consumed_samples))

    def windows(self, split: Split, consumed_samples: int) -> npt.NDArray[np.int32]:
        """Windows of this replica's micro-batches for ``of_windows``: int32, shape ``windows_shape``.

        Raises:
            DataError: the text cannot be read, or has a token outside the vocabulary.
        """
        numbers = self._numbers(split, consumed_samples)
        windows = self._checked(read_windows(self._samples[split], numbers), consumed_samples)
        return windows.astype(np.int32, copy=False).reshape(self.windows_shape(split, consumed_samples))

    def of_windows(self, windows: npt.NDArray[np.int32]) -> list[MicroBatch]:
        """Build this replica's micro-batches from their windows."""
        return self._of_whole(windows.reshape(-1, windows.shape[-1]))

    def _checked(self, whole: Tokens, first: int) -> Tokens:
        """Return ``whole``, samples from ``first`` on, if all tokens are in the vocabulary."""
        # Viewed as unsigned, negative tokens are the largest.
        if int(whole.view(f"u{whole.itemsize}").max()) >= self.vocab_size:
            wrong = whole[(whole >= self.vocab_size) | (whole < 0)][0]
            raise DataError(
                f"data.data_path: a sample from {first} on has token {wrong}, but model.vocab_size is "
                f"{self.vocab_size}; set model.vocab_size to the vocabulary size of the data"
            )
        return whole

    def placeholders(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """The micro-batches with dummy tokens, for ranks that only pass on activations."""
        nothing = torch.zeros(1, 1, dtype=torch.int64).expand(self._shape.micro_batch_size, self._shape.seq_length)
        return [MicroBatch(nothing, nothing, index=index) for index in self._indexes(split, consumed_samples)]

    def _of_packed(self, samples: list[PackedSample], first: int) -> list[MicroBatch]:
        tokens, labels = (
            self._checked(np.stack([getattr(one, name) for one in samples]), first) for name in ("tokens", "labels")
        )
        counts = np.concatenate([one.counts for one in samples])
        return self._divided(tokens, labels, counts, DocumentEnds.between([one.bounds for one in samples]))

    def _of_whole(self, windows: Tokens, counts: npt.NDArray[np.bool_] | None = None) -> list[MicroBatch]:
        """Build micro-batches from windows [N, S + 1] and the labels that count [N, S]; None: all."""
        places = DocumentPlaces()
        if self._packing is not None:
            # Compare before the cast to int64, which would fill the caches of a core. Whole windows are contiguous, and
            # their comparison takes half the time of that of slices.
            places = self._packing.places_of(windows == self._packing.end, windows.shape[1] - 1)
        if counts is not None and places.counts is not None:
            counts = counts & places.counts
        return self._divided(windows[:, :-1], windows[:, 1:], places.counts if counts is None else counts, places.ends)

    def _divided(
        self, tokens: Tokens, labels: Tokens, counts: npt.NDArray[np.bool_] | None, ends: DocumentEnds | None
    ) -> list[MicroBatch]:
        """Build micro-batches of N samples together: a call costs more than its work."""
        size = self._shape.micro_batch_size
        shape = (len(tokens) // size, size, tokens.shape[1])
        nothing: Sequence[None] = [None] * shape[0]
        apart = nothing if ends is None else ends.documents(size)
        inputs, targets = (torch.from_numpy(part.astype(np.int64)).view(shape).unbind() for part in (tokens, labels))
        masks = nothing if counts is None else torch.from_numpy(counts).view(shape).unbind()
        attention, restarts = (apart if asked else nothing for asked in (self._separates, self._restarts))
        indexes = self._shape.micro_batches(shape[0])
        parts = zip(inputs, targets, masks, indexes, attention, restarts, strict=True)
        return [MicroBatch(*part) for part in parts]
