"""Micro-batches: which samples of the global batch this replica trains on, as tensors.

Legend: B micro-batch, S sequence.

Everything is a function of ``consumed_samples``, the number of samples that all replicas together have trained on, so
that a run resumes at its place on any layout. Sample i of a global batch belongs to the global micro-batch
``k = i // micro_batch_size``; replica ``k % dp`` runs it as its micro-batch ``k // dp``. Micro-batch k is therefore the
same samples for every dp, and its number serves to draw its dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.errors import DataError
from trainer.data.samples.document_places import Bounds, DocumentEnds, Documents
from trainer.data.samples.windows import Tokens, read_windows

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class MicroBatch:
    """What one pass through the model takes. Every pipeline stage and tensor-parallel rank gets the same."""

    tokens: torch.Tensor
    """int64 [B, S]."""
    labels: torch.Tensor
    """int64 [B, S]: the token that follows each of ``tokens``."""
    loss_mask: torch.Tensor | None = None
    """bool [B, S], or numbers of any type, 1 where the label counts; None: all count."""
    index: int = 0
    """Number of this micro-batch within the global batch, the same for every layout."""
    documents: Documents | None = None
    """Set where attention must not cross from one document to another."""
    restarts: Documents | None = None
    """Set where positions begin anew with each document."""

    @property
    def positions(self) -> torch.Tensor | None:
        """int32 [B, S] of whole samples, on the device of ``tokens``; None: they count along the sequence."""
        return None if self.restarts is None else self.restarts.positions(self.tokens.device)

    @property
    def valid_tokens(self) -> int:
        """How many labels count. On a GPU this waits for the mask: count before ``to``."""
        return self.labels.numel() if self.loss_mask is None else int(self.loss_mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``; from pinned memory a GPU copies it while the CPU goes on."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """The same in memory that a GPU can read by itself."""
        if self.restarts is not None:
            self.restarts.pin()
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        mask = None if self.loss_mask is None else change(self.loss_mask)
        return replace(self, tokens=change(self.tokens), labels=change(self.labels), loss_mask=mask)


@dataclass(frozen=True)
class PackedSample:
    """A sample of whole documents and padding, each of which attention stays within."""

    tokens: Tokens
    """[S]."""
    labels: Tokens
    """[S]: of each token the one that follows it in its document."""
    counts: npt.NDArray[np.bool_]
    """[S]: whether a label counts in the loss."""
    bounds: Bounds
    """As those of Documents."""


Sample = Tokens | PackedSample
"""A window of ``seq_length + 1`` tokens, or what whole documents fill."""


class Samples(Protocol):
    """An endless sequence of samples, all of one kind."""

    def sample(self, number: int) -> Sample:
        """Sample ``number``."""


class Stream(Protocol):
    """Text that is encoded while the model trains; see trainer.data.streaming.stream."""

    def state(self, consumed_samples: int) -> dict[str, Any]:
        """Plain values for a checkpoint, from which training goes on at this sample."""

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what a checkpoint holds."""

    def close(self) -> None:
        """End the processes."""


@runtime_checkable
class LibraryUser(Protocol):
    """Samples that are found sooner with the library of kernels."""

    def use_library(self, library: Path | None) -> None:
        """Find them with ``library``, as of trainer.data.samples.compiled; they stay the same."""


class SampleOrder(Protocol):
    """What training samples come from, as far as a checkpoint has to tell; see trainer.data.samples.continuation."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""

    def restore(self, state: Mapping[str, Any], consumed_samples: int) -> str | None:
        """Go on from what a checkpoint holds; returns a line about what has changed, if anything has."""


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
        """``batch``, on the CPU, with its loss mask and documents."""
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
        """What is asked for about documents of samples of ``length`` tokens.

        Args:
            is_end: [N, ``length`` or more], whether a token is ``end``; ours from now on.
            length: S.
        """
        counts = ~is_end[:, :length] if self.mask_loss else None
        if not (self.separate_attention or self.restart_positions):
            return DocumentPlaces(counts, None)
        return DocumentPlaces(counts, DocumentEnds(is_end, length))


class DocumentPlaces(NamedTuple):
    """Where the documents of N samples lie, each part None where it was not asked for."""

    counts: npt.NDArray[np.bool_] | None = None
    """[N, S]: whether a label counts in the loss."""
    ends: DocumentEnds | None = None


class TrainData:
    """The samples of a run, by split. Made by trainer.data.loading.build.build_data."""

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
    ) -> None:
        """Wrap ``samples``.

        Args:
            samples: the splits that there are.
            vocab_size: number of token ids, not padded.
            shape: batch sizes and this replica's place.
            packing: what is done about documents; None: nothing.
            notes: one line each for what a reader of the log should know; rank 0 prints them.
            masks_loss: samples are packed documents, and themselves tell of labels that do not count.
            stream: what the samples, all windows, are encoded from as they are asked for; None: they are there.
            order: of the samples for training, which checkpoints tell of; None: there is nothing to tell.
        """
        self.vocab_size = vocab_size
        self.notes = notes
        self.stream = stream
        self._samples = dict(samples)
        self._shape = shape
        self._packing = packing
        self._order = order
        # Numbers, within the global batch, of this replica's micro-batches and of their samples.
        size = shape.micro_batch_size
        self._indexes = range(shape.dp_rank, shape.global_batch_size // size, shape.dp)
        self._offsets = (np.array(self._indexes, np.int64)[:, None] * size + np.arange(size)).ravel()
        self._is_packed = masks_loss
        self._masks_loss = masks_loss or (packing is not None and packing.mask_loss)
        self._separates = masks_loss or (packing is not None and packing.separate_attention)
        self._restarts = masks_loss or (packing is not None and packing.restart_positions)

    def use_library(self, library: Path | None) -> None:
        """Find the samples of blends with the library of kernels; the samples stay the same."""
        for samples in self._samples.values():
            if isinstance(samples, LibraryUser):
                samples.use_library(library)

    @property
    def masks_loss(self) -> bool:
        """Whether some labels do not count, so that the tokens of a global batch have to be counted."""
        return self._masks_loss

    def state(self, consumed_samples: int) -> dict[str, Any] | None:
        """Plain values for a checkpoint, from which training goes on at this sample; None: the number tells all."""
        if self.stream is not None:
            return self.stream.state(consumed_samples)
        return None if self._order is None else self._order.state()

    def restore(self, state: Mapping[str, Any] | None, consumed_samples: int) -> None:
        """Go on from what a checkpoint holds; what has changed since is noted.

        Raises:
            DataError: the order of the samples cannot be gone on with.
        """
        if self.stream is not None:
            self.stream.restore(state)
        elif self._order is not None and state is not None:
            changed = self._order.restore(state, consumed_samples)
            self.notes += () if changed is None else (changed,)

    def has(self, split: Split) -> bool:
        """Whether there is anything to read in ``split``."""
        return split in self._samples

    @property
    def has_documents(self) -> bool:
        """Whether every stage of a pipeline needs to know where documents end."""
        return self._separates or self._restarts

    @property
    def step(self) -> int:
        """Samples of a global batch."""
        return self._shape.global_batch_size

    @property
    def windows_shape(self) -> tuple[int, int, int]:
        """[micro-batches of this replica, B, S + 1]."""
        return (len(self._indexes), self._shape.micro_batch_size, self._shape.seq_length + 1)

    def micro_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """This replica's micro-batches of the global batch that starts at ``consumed_samples``.

        Raises:
            DataError: the data holds a token outside the vocabulary.
        """
        numbers = self._offsets + consumed_samples
        if self._is_packed:
            packed = [cast(PackedSample, self._samples[split].sample(number)) for number in numbers.tolist()]
            return self._of_packed(packed, consumed_samples)
        return self._of_whole(self._checked(read_windows(self._samples[split], numbers), consumed_samples))

    def windows(self, split: Split, consumed_samples: int) -> npt.NDArray[np.int32]:
        """What ``of_windows`` makes the same micro-batches of: int32 of ``windows_shape``.

        Raises:
            DataError: the text cannot be read, or holds a token outside the vocabulary.
        """
        windows = self._checked(read_windows(self._samples[split], self._offsets + consumed_samples), consumed_samples)
        return windows.astype(np.int32, copy=False).reshape(self.windows_shape)

    def of_windows(self, windows: npt.NDArray[np.int32]) -> list[MicroBatch]:
        """This replica's micro-batches out of their windows of tokens."""
        return self._of_whole(windows.reshape(-1, windows.shape[-1]))

    def _checked(self, whole: Tokens, first: int) -> Tokens:
        """``whole``, of samples from ``first`` on, if its tokens are within the vocabulary."""
        # Negative ones are the largest of all where they are read as unsigned.
        if int(whole.view(f"u{whole.itemsize}").max()) >= self.vocab_size:
            wrong = whole[(whole >= self.vocab_size) | (whole < 0)][0]
            raise DataError(
                f"data.data_path: sample {first} and on hold token {wrong}, but model.vocab_size is {self.vocab_size}; "
                "set it to the vocabulary that the data was tokenized with"
            )
        return whole

    def placeholders(self) -> list[MicroBatch]:
        """Micro-batches of the right shapes whose tokens mean nothing, for who only passes activations on."""
        _, size, window = self.windows_shape
        nothing = torch.zeros(1, 1, dtype=torch.int64).expand(size, window - 1)
        return [MicroBatch(nothing, nothing, index=index) for index in self._indexes]

    def _of_packed(self, samples: list[PackedSample], first: int) -> list[MicroBatch]:
        tokens, labels = (
            self._checked(np.stack([getattr(one, name) for one in samples]), first) for name in ("tokens", "labels")
        )
        counts = np.concatenate([one.counts for one in samples])
        return self._divided(tokens, labels, counts, DocumentEnds.between([one.bounds for one in samples]))

    def _of_whole(self, windows: Tokens) -> list[MicroBatch]:
        """Micro-batches of windows [N, S + 1]."""
        places = DocumentPlaces()
        if self._packing is not None:
            # Before tokens take eight bytes each, which leaves nothing else in the caches of a core. Whole windows lie
            # side by side in memory, and are compared in half the time of their parts.
            places = self._packing.places_of(windows == self._packing.end, windows.shape[1] - 1)
        return self._divided(windows[:, :-1], windows[:, 1:], *places)

    def _divided(
        self, tokens: Tokens, labels: Tokens, counts: npt.NDArray[np.bool_] | None, ends: DocumentEnds | None
    ) -> list[MicroBatch]:
        """Micro-batches of N samples; made all at once, as each step costs more than its work on one sample."""
        size = self._shape.micro_batch_size
        shape = (len(self._indexes), size, tokens.shape[1])
        nothing: Sequence[None] = [None] * shape[0]
        apart = nothing if ends is None else ends.documents(size)
        inputs, targets = (torch.from_numpy(part.astype(np.int64)).view(shape).unbind() for part in (tokens, labels))
        masks = nothing if counts is None else torch.from_numpy(counts).view(shape).unbind()
        attention, restarts = (apart if asked else nothing for asked in (self._separates, self._restarts))
        parts = zip(inputs, targets, masks, self._indexes, attention, restarts, strict=True)
        return [MicroBatch(*part) for part in parts]
