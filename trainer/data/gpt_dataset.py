"""GPT samples from an indexed dataset: windows of ``seq_length + 1`` tokens, in an order without end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.epoch_index import (
    EpochIndex,
    Epochs,
    build_epoch_index,
    bytes_to_build,
    megatron_epochs,
    samples_per_epoch,
)
from trainer.data.index_cache import EpochIndexCache
from trainer.data.indexed_dataset import IndexedDataset


def split_sequences(count: int, shares: Sequence[float]) -> list[range]:
    """Sequences of the train, valid and test split: contiguous, cut at ``int(round(cumulative share x count))``.

    Megatron-LM's rule (megatron/core/datasets/blended_megatron_dataset_builder.py); for GPT data a sequence is a
    document that is not empty.
    """
    bounds, cumulative = [0], 0.0
    for share in shares:
        cumulative += share
        bounds.append(int(round(cumulative * count)))
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


class GPTDataset:
    """Sample i of the endless sequence of epochs over one split; see trainer.data.epoch_index for the order."""

    def __init__(
        self,
        tokens: IndexedDataset,
        sequences: range,
        seq_length: int,
        seed: int,
        cache: EpochIndexCache | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Samples of ``sequences`` of ``tokens``.

        Args:
            tokens: the open pair of files.
            sequences: those of the split.
            seq_length: tokens per sample, besides the one that is only predicted.
            seed: of the order.
            cache: where indexes are kept; None: nowhere.
            num_samples: length of the run, for Megatron-LM's order over all of its epochs; whoever asks for more
                samples than these epochs hold gets them once more. None: each epoch is shuffled by itself.
        """
        self._tokens = tokens
        self._sequences = sequences
        self._seq_length = seq_length
        self._seed = seed
        self._cache = cache
        # As they are stored, but for types that nobody writes.
        self._dtype = np.promote_types(tokens.dtype, np.uint16)
        self._lengths = tokens.sequence_lengths[sequences.start : sequences.stop]
        self._indexes: dict[int, EpochIndex] = {}
        self.token_count = tokens.first_token(sequences.stop) - tokens.first_token(sequences.start)
        self.samples_per_epoch = samples_per_epoch(self.token_count, seq_length)
        self._together: Epochs | None = None
        if num_samples is not None and self.token_count:
            self._together = megatron_epochs(self.token_count, seq_length, num_samples)
        epochs = self._together.count if self._together is not None else 1
        self.has_samples = samples_per_epoch(epochs * self.token_count, seq_length) > 0
        """Whether there is a single one. Megatron-LM's order also joins epochs that are shorter than a sample."""

    @property
    def order(self) -> str:
        """Which order it is, besides its seed; that of a single epoch is the same either way."""
        if self._together is None or self._together == Epochs():
            return "each epoch shuffled by itself"
        apart = ", the last one apart" if self._together.separate_last else ""
        return f"{self._together.count} epochs shuffled together{apart}"

    @property
    def index_bytes(self) -> int:
        """Memory that it takes to work out the order of the epochs that are shuffled together."""
        return bytes_to_build(len(self._lengths), self.token_count, self._seq_length, self._together or Epochs())

    def sample(self, number: int) -> npt.NDArray[np.integer[Any]]:
        """The ``seq_length + 1`` tokens of sample ``number``, counted over all epochs: uint16, int32 or int64.

        Raises:
            IndexError: the split is too short for a single sample.
        """
        if not self.has_samples:
            raise IndexError(f"{self._tokens.prefix}: {self.token_count} tokens are too few for one sample")
        if self._cache is not None:
            self._cache.touch()
        if self._together is None:
            epoch, place = divmod(number, self.samples_per_epoch)
            index = self._indexes.get(epoch) or self._prepare(Epochs(epoch))
        else:
            index = self._indexes.get(0) or self._prepare(self._together)
            place = number % len(index.samples)
        return self._read(index, int(index.samples[place]) * self._seq_length)

    def _read(self, index: EpochIndex, start: int) -> npt.NDArray[np.integer[Any]]:
        stop = start + self._seq_length + 1
        # The documents that hold tokens start to stop; the search skips those without tokens before the first.
        first = int(index.ends.searchsorted(start, side="right"))
        last = int(index.ends.searchsorted(stop, side="left"))
        cuts = np.empty(last - first + 2, np.int64)
        cuts[0], cuts[1:-1], cuts[-1] = start, index.ends[first:last], stop
        documents = index.documents[first : last + 1].astype(np.int64)
        documents += self._sequences.start
        places = self._tokens.first_tokens(documents)
        places[0] += start - (int(index.ends[first - 1]) if first else 0)
        window = np.empty(stop - start, self._dtype)
        self._tokens.read_ranges_into(places, cuts[1:] - cuts[:-1], window)
        return window

    def _prepare(self, epochs: Epochs) -> EpochIndex:
        # A batch may reach into the next epoch; older ones are done with.
        self._indexes = {first: index for first, index in self._indexes.items() if first == epochs.first - 1}
        build = build_epoch_index if self._cache is None else self._cache.load_or_build
        index = self._indexes[epochs.first] = build(self._lengths, self._seq_length, self._seed, epochs)
        return index
