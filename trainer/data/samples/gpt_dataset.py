"""GPT samples: windows of ``seq_length + 1`` tokens over endless epochs."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.epoch_index import (
    EpochIndex,
    Epochs,
    build_epoch_index,
    bytes_to_build,
    megatron_epochs,
    samples_per_epoch,
)
from trainer.data.samples.index_cache import EpochIndexCache, LengthsSummary
from trainer.data.samples.windows import Numbers, Tokens

Ranges = tuple[Numbers, Numbers]
"""Starts of token ranges in the file, and their lengths."""
FEW_SAMPLES = 4
"""Below this number of samples a loop, 6 us per sample, beats the batched lookup, 27 us + 0.5 us per sample."""


class GPTDataset:
    """Samples of endless epochs over one split, in the order of trainer.data.samples.epoch_index."""

    def __init__(
        self,
        tokens: IndexedDataset,
        sequences: range,
        seq_length: int,
        seed: int,
        cache: EpochIndexCache | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Prepare samples of ``sequences`` of ``tokens``.

        Args:
            tokens: the open indexed dataset.
            sequences: sequences of the split.
            seq_length: input tokens per sample; a sample has one more token, the last label.
            seed: seed of the order.
            cache: cache of epoch indexes; None: no cache.
            num_samples: samples of the run, for Megatron-LM's order over all epochs of the run; samples beyond these
                epochs repeat the order. None: shuffle each epoch separately.
        """
        self._tokens = tokens
        self._sequences = sequences
        self._seq_length = seq_length
        self._seed = seed
        self._cache = cache
        # The stored dtype, except for the 8-bit types, which no tool writes.
        self._dtype = np.promote_types(tokens.dtype, np.uint16)
        self._lengths = tokens.sequence_lengths[sequences.start : sequences.stop]
        self._indexes: dict[int, EpochIndex] = {}
        self.token_count = tokens.first_token(sequences.stop) - tokens.first_token(sequences.start)
        self._together: Epochs | None = None
        if num_samples is not None and self.token_count:
            self._together = megatron_epochs(self.token_count, seq_length, num_samples)
        epochs = self._together.count if self._together is not None else 1
        self.has_samples = epochs * self.token_count > seq_length
        """True if there is any sample. Megatron-LM's order also joins epochs that are shorter than a sample."""
        self.order = "each epoch shuffled by itself"
        """Name of the order, without the seed; the same in both modes for a single epoch."""
        if self._together is not None and self._together != Epochs():
            apart = ", the last one apart" if self._together.separate_last else ""
            self.order = f"{self._together.count} epochs shuffled together{apart}"

    @cached_property
    def samples_per_epoch(self) -> int:
        """Number of samples of one epoch."""
        return samples_per_epoch(self.token_count, self._seq_length)

    @property
    def index_bytes(self) -> int:
        """Memory needed to build the index of the epochs that are shuffled together."""
        return bytes_to_build(len(self._lengths), self.token_count, self._seq_length, self._together or Epochs())

    @property
    def is_cached(self) -> bool:
        """True if the cache has the index of the epochs that are shuffled together."""
        epochs = self._together or Epochs()
        if self._cache is None:
            return False
        summary = LengthsSummary.of_sequences(self._tokens, self._sequences)
        return self._cache.has(self._lengths, self._seq_length, self._seed, epochs, summary)

    def sample(self, number: int) -> Tokens:
        """Tokens of sample ``number``, counted over all epochs, [seq_length + 1].

        The dtype is uint16, int32 or int64.

        Raises:
            IndexError: the split is too short for a single sample.
        """
        index, place = self._find(number)
        window = np.empty(self._seq_length + 1, self._dtype)
        self._tokens.read_ranges_into(*self._ranges(index, int(index.samples[place]) * self._seq_length), window)
        return window

    def windows(self, numbers: Numbers) -> Tokens:
        """Tokens of N samples, [N, seq_length + 1]; faster than single calls of ``sample``.

        Raises:
            IndexError: the split is too short for a single sample.
        """
        windows = np.empty((len(numbers), self._seq_length + 1), self._dtype)
        done = 0
        while done < len(numbers):
            index, place = self._find(int(numbers[done]))
            # The leading samples that belong to the same epoch index.
            places = numbers[done:] + (place - numbers[done])
            others = np.flatnonzero((places < 0) | (places >= len(index.samples)))
            count = int(others[0]) if len(others) else len(places)
            starts = index.samples[places[:count]].astype(np.int64) * self._seq_length
            part = windows[done : done + count]
            if count < FEW_SAMPLES:
                for window, start in zip(part, starts.tolist(), strict=True):
                    self._tokens.read_ranges_into(*self._ranges(index, start), window)
            else:
                self._tokens.read_ranges_into(*self._ranges_of_many(index, starts), part.reshape(-1))
            done += count
        return windows

    def _find(self, number: int) -> tuple[EpochIndex, int]:
        """Epoch index of sample ``number``, and the place of the sample in that index."""
        if not self.has_samples:
            raise IndexError(f"{self._tokens.prefix}: {self.token_count} tokens are too few for one sample")
        if self._cache is not None:
            self._cache.touch()
        if self._together is None:
            epoch, place = divmod(number, self.samples_per_epoch)
            return self._indexes.get(epoch) or self._prepare(Epochs(epoch)), place
        index = self._indexes.get(0) or self._prepare(self._together)
        return index, number % len(index.samples)

    def _ranges(self, index: EpochIndex, start: int) -> Ranges:
        """Ranges in the file of the sample that begins at ``start`` of the stream."""
        stop = start + self._seq_length + 1
        # Documents with the tokens start to stop; the search skips empty documents before the first.
        first, last = index.ends.searchsorted((start, stop - 1), side="right").tolist()
        cuts = np.empty(last - first + 2, np.int64)
        cuts[0], cuts[1:-1], cuts[-1] = start, index.ends[first:last], stop
        documents = index.documents[first : last + 1].astype(np.int64)
        documents += self._sequences.start
        places = self._tokens.first_tokens(documents)
        places[0] += start - (int(index.ends[first - 1]) if first else 0)
        return places, cuts[1:] - cuts[:-1]

    def _ranges_of_many(self, index: EpochIndex, starts: Numbers) -> Ranges:
        """Concatenated ranges in the file of several samples."""
        stops = starts + (self._seq_length + 1)
        first, last = index.ends.searchsorted(np.stack((starts, stops - 1)), side="right")
        counts = last - first + 1
        after = counts.cumsum()
        heads = after - counts
        # For each document its place in the order, and its begin and end in the stream within the sample.
        order = np.arange(after[-1])
        order += np.repeat(first - heads, counts)
        ends = index.ends[order]
        ends[after - 1] = stops
        begins = np.empty_like(ends)
        begins[1:] = ends[:-1]
        begins[heads] = starts
        documents = index.documents[order].astype(np.int64)
        documents += self._sequences.start
        places = self._tokens.first_tokens(documents)
        places[heads] += starts - np.where(first > 0, index.ends[first - 1], 0)
        return places, ends - begins

    def _prepare(self, epochs: Epochs) -> EpochIndex:
        # A batch may reach into the next epoch; drop older indexes.
        self._indexes = {first: index for first, index in self._indexes.items() if first == epochs.first - 1}
        asked = (self._lengths, self._seq_length, self._seed, epochs)
        if self._cache is None:
            index = build_epoch_index(*asked)
        else:
            index = self._cache.load_or_build(*asked, LengthsSummary.of_sequences(self._tokens, self._sequences))
        self._indexes[epochs.first] = index
        return index
