"""What a model without any context would reach: the mark that learning has to leave behind."""

from __future__ import annotations

import numpy as np

from trainer.data.index_format import CHUNK
from trainer.data.indexed_dataset import IndexedDataset


def unigram_loss(tokens: IndexedDataset, train: range, held_out: range, vocab_size: int) -> float:
    """Mean nats per held-out token under the token frequencies of the training sequences, with one added to each.

    Adding one (Laplace's rule) keeps held-out tokens that training never saw from costing infinitely much.
    """
    seen = _counts(tokens, train, vocab_size) + 1
    wanted = _counts(tokens, held_out, vocab_size)
    return float(-(wanted * np.log(seen / seen.sum())).sum() / wanted.sum())


def _counts(tokens: IndexedDataset, sequences: range, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    counts = np.zeros(vocab_size, np.int64)
    start, stop = tokens.first_token(sequences.start), tokens.first_token(sequences.stop)
    for first in range(start, stop, CHUNK):
        counts += np.bincount(tokens.read(first, min(stop, first + CHUNK)), minlength=vocab_size)
    return counts
