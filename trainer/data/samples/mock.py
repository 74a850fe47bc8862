"""Mock data: a generated, learnable token stream, the same for every parallel layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DEFAULT_VOCAB_SIZE = 256
MOCK_NOTE = "mock data: the trained model will be useless"
USED_VOCABULARY = 1024
"""Largest number of distinct tokens: few enough that a model learns the successors of each within minutes."""
STEPS = np.array([1, 2, 3, 5, 8, 13], dtype=np.int64)
STEP_SHARES = np.array([0.45, 0.25, 0.12, 0.08, 0.06, 0.04])


class MockDataset:
    """Random walks on a ring of tokens with six successors per token.

    The probabilities are fixed. An untrained model starts at ln(vocab_size) nats per token; one that has learned the
    walk ends at ``entropy``.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, split: int) -> None:
        self._ring = min(vocab_size, USED_VOCABULARY)
        self._seq_length = seq_length
        self._seed = seed % (1 << 32)
        self._split = split

    @property
    def entropy(self) -> float:
        """Lowest reachable loss in nats per token, for rings longer than any step."""
        return float(-(STEP_SHARES * np.log(STEP_SHARES)).sum())

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Tokens of sample ``number``, [seq_length + 1].

        The tokens depend only on the number, the seed and the split.
        """
        # Philox is addressed by key and counter, so that every sample takes the same time.
        key = np.array([self._seed << 32 | self._split, number], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        steps = np.searchsorted(np.cumsum(STEP_SHARES)[:-1], random.random(self._seq_length), side="right")
        start = random.integers(self._ring)
        walk = np.concatenate(([start], STEPS[steps])).cumsum() % self._ring
        return walk.astype(np.int64, copy=False)
