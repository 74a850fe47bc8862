"""Fine-tuning samples: whole documents packed into sequences of ``seq_length`` by best fit.

A document of n tokens takes n - 1 positions, each of which predicts the next token. A document is never cut and never
attends to another document. The remaining positions are padding, which does not count in the loss.

With ``answers_only`` the sequences of a document (trainer.data.indexed.index_format) alternate between prompt and
answer, ending with an answer: ``[prompt, answer]``, ``[prompt, answer, prompt, answer]``, or only ``[answer]``. Only
tokens of answers count in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.batches import PackedSample
from trainer.data.samples.best_fit import best_fit


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch."""

    documents: npt.NDArray[np.int64]
    """Documents in use, sample by sample."""
    bounds: npt.NDArray[np.int64]
    """Start of each sample in ``documents``, and the length of ``documents``."""
    samples: npt.NDArray[np.int64]
    """Samples in the order of training."""


class PackedDataset:
    """Packed samples of endless epochs over the documents of one split.

    ``RandomState([seed, epoch])`` shuffles each epoch: first the documents, which decides which documents of equal
    length share a sample, then the samples. Every epoch has the same number of samples.
    """

    def __init__(
        self, tokens: IndexedDataset, sequences: range, seq_length: int, seed: int, answers_only: bool = False
    ) -> None:
        """Prepare samples of ``sequences``, whose bounds must be document bounds.

        Raises:
            DataError: ``answers_only`` is set, but no document has a prompt.
        """
        self._tokens = tokens
        self._seq_length = seq_length
        # The stored dtype, except for the 8-bit types, which no tool writes.
        self._dtype = np.promote_types(tokens.dtype, np.uint16)
        self._seed = seed % (1 << 32)
        self._answers_only = answers_only
        entries = np.unique(tokens.document_indices)  # drops empty documents, which begin where the next one does
        entries = entries[np.searchsorted(entries, sequences.start) : np.searchsorted(entries, sequences.stop) + 1]
        self._first_sequences = entries  # of each document, and the end of the last one
        starts = tokens.first_tokens(entries)
        self._starts, places = starts[:-1], np.diff(starts) - 1
        fits = (places > 0) & (places <= seq_length)
        self._places = places[fits]
        self._used = np.flatnonzero(fits)
        self.token_count = int(starts[-1] - starts[0]) if len(starts) else 0
        self.documents = len(places)
        self.too_long = int((places > seq_length).sum())
        if answers_only and not (np.diff(tokens.document_indices) > 1).any():
            raise DataError(
                f"{tokens.prefix}: every document is a single sequence, without a separate prompt; prepare the data "
                "with prompts and answers as separate sequences, or leave data.answer_only_loss out"
            )
        self._epoch_number = -1
        self.samples_per_epoch = len(self._epoch(0).samples)

    @property
    def order(self) -> str:
        """Name of the order, without the seed."""
        return "whole documents by best fit"

    @property
    def has_samples(self) -> bool:
        """True if there is any sample."""
        return self.samples_per_epoch > 0

    def sample(self, number: int) -> PackedSample:
        """Read sample ``number``, counted over all epochs.

        Raises:
            IndexError: no document fits into a sample.
        """
        if not self.samples_per_epoch:
            raise IndexError(f"{self._tokens.prefix}: no document fits into {self._seq_length} tokens")
        epoch, place = divmod(number, self.samples_per_epoch)
        index = self._epoch(epoch)
        sample = int(index.samples[place])
        chosen = index.documents[index.bounds[sample] : index.bounds[sample + 1]]
        documents, places = self._used[chosen], self._places[chosen]
        starts, ends = self._starts[documents], places.cumsum()
        filled = int(ends[-1])
        # Padding may be any token: only padding attends to padding, and it does not count in the loss.
        tokens, labels = np.zeros((2, self._seq_length), self._dtype)
        self._tokens.read_ranges_into(starts, places, tokens[:filled])
        self._tokens.read_ranges_into(starts + 1, places, labels[:filled])
        counts = np.zeros(self._seq_length, np.bool_)
        counts[:filled] = self._is_answer(documents) if self._answers_only else True
        padding = [] if filled == self._seq_length else [self._seq_length]
        return PackedSample(tokens, labels, counts, (0, *ends.tolist(), *padding))

    def _is_answer(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mask of answer tokens in ``documents``, without the documents' first tokens."""
        parts = []
        for document in documents.tolist():
            first, stop = self._first_sequences[document : document + 2].tolist()
            lengths = self._tokens.sequence_lengths[first:stop]
            answers = np.arange(stop - first)[::-1] % 2 == 0
            parts.append(np.repeat(answers, lengths)[1:])
        return np.concatenate(parts)

    def _epoch(self, number: int) -> _Epoch:
        if number != self._epoch_number:
            random = np.random.RandomState([self._seed, number])
            order = random.permutation(len(self._places))
            samples = best_fit(self._places[order], self._seq_length)
            documents = order[np.argsort(samples, kind="stable")]
            bounds = np.concatenate([[0], np.cumsum(np.bincount(samples))]).astype(np.int64)
            self._current = _Epoch(documents, bounds, random.permutation(len(bounds) - 1))
            self._epoch_number = number
        return self._current
