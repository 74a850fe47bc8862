"""GPT samples from an indexed dataset: windows of ``seq_length + 1`` tokens, in an order without end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.epoch_index import EpochIndex, EpochIndexCache, build_epoch_index, samples_per_epoch
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
        self, tokens: IndexedDataset, sequences: range, seq_length: int, seed: int, cache: EpochIndexCache | None = None
    ) -> None:
        self._tokens = tokens
        self._sequences = sequences
        self._seq_length = seq_length
        self._seed = seed
        self._cache = cache
        self._lengths = tokens.sequence_lengths[sequences.start : sequences.stop]
        self._epochs: dict[int, EpochIndex] = {}
        self.token_count = int(self._lengths.sum(dtype=np.int64))
        self.samples_per_epoch = samples_per_epoch(self.token_count, seq_length)

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """The ``seq_length + 1`` tokens of sample ``number``, counted over all epochs.

        Raises:
            IndexError: the split is too short for a single sample.
        """
        if not self.samples_per_epoch:
            raise IndexError(f"{self._tokens.prefix}: {self.token_count} tokens are too few for one sample")
        epoch, place = divmod(number, self.samples_per_epoch)
        index = self._index(epoch)
        start = int(index.samples[place]) * self._seq_length
        return self._read(index, start, start + self._seq_length + 1)

    def _read(self, index: EpochIndex, start: int, stop: int) -> npt.NDArray[np.int64]:
        window = np.empty(stop - start, np.int64)
        # The documents that hold tokens start to stop; the search skips those without tokens before the first.
        place = int(np.searchsorted(index.ends, start, side="right"))
        position = start
        while position < stop:
            sequence = self._sequences.start + int(index.documents[place])
            end = int(index.ends[place])
            length = min(end, stop) - position
            first = self._tokens.first_token(sequence + 1) - (end - position)
            window[position - start : position - start + length] = self._tokens.read(first, first + length)
            position += length
            place += 1
        return window

    def _index(self, epoch: int) -> EpochIndex:
        if epoch not in self._epochs:
            # A batch may reach into the next epoch; older ones are done with.
            self._epochs = {known: index for known, index in self._epochs.items() if known == epoch - 1}
            build = build_epoch_index if self._cache is None else self._cache.load_or_build
            self._epochs[epoch] = build(self._lengths, self._seq_length, self._seed, epoch)
        return self._epochs[epoch]
