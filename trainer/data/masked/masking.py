"""Choice of masked tokens: words and spans of words, as in Megatron-LM.

Devlin et al. 2018 (arXiv:1810.04805) mask single word pieces, the authors' later code whole words; Joshi et al. 2019
(SpanBERT, arXiv:1907.10529, section 3.1) mask spans with a geometric number of words. The draws are exactly those of
Megatron-LM (megatron/core/datasets/masked_dataset.py), so that the same seed masks the same tokens. The vocabulary
defines the words (trainer.data.tokenizers.words): with ## for continued words they are Megatron-LM's, which supports no
other vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.tokenizers.tokenizer import SpecialTokens
from trainer.data.tokenizers.words import WordPieces

GEOMETRIC = 0.2
"""Parameter of SpanBERT's distribution: 3.8 words on average for spans of up to ten words."""
LONGEST_RUN = 10_000
"""Largest span in words; a share is computed for each length."""

Ids = npt.NDArray[np.int64]


class Pieces(Protocol):
    """Methods of a tokenizer that masking needs; every Tokenizer has them."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: one more than the largest id."""

    @property
    def specials(self) -> SpecialTokens:
        """Ids of the special tokens."""

    def word_pieces(self) -> WordPieces:
        """Table of the tokens that begin a word."""


@dataclass(frozen=True)
class MaskingRules:
    """Masking rules, under Megatron-LM's names.

    Raises:
        DataError: a number is out of range.
    """

    mask_prob: float = 0.15
    """Share of masked tokens."""
    masking_max_ngram: int = 3
    """Largest number of words in a masked span."""
    masking_do_full_word: bool = True
    """Mask whole words; otherwise each token counts as a word."""
    masking_use_longer_ngrams: bool = False
    """Frequency of spans of n words proportional to 1 / (max - n + 1) instead of 1 / n."""
    masking_use_geometric_distribution: bool = False
    """Geometric number of words in a span, up to the largest."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise DataError(f"mask_prob: {self.mask_prob} is not between 0 and 1; 0.15 is usual")
        if not 1 <= self.masking_max_ngram <= LONGEST_RUN:
            raise DataError(f"masking_max_ngram: {self.masking_max_ngram:,} is out of range; use 1 to {LONGEST_RUN:,}")

    @cached_property
    def run_shares(self) -> npt.NDArray[np.float64]:
        """Frequencies of spans of 1, 2, ... words."""
        sizes = np.arange(1, self.masking_max_ngram + 1)
        if self.masking_use_geometric_distribution:
            shares: npt.NDArray[Any] = GEOMETRIC * (1 - GEOMETRIC) ** (sizes - 1)
            shares[-1] += 1 - shares.sum()
            return shares
        shares = 1.0 / sizes
        shares /= shares.sum()
        if self.masking_use_longer_ngrams:
            shares = shares[::-1]
        shares /= shares.sum()
        return shares

    @cached_property
    def mean_run(self) -> float:
        """Average number of words in a span."""
        return float(self.run_shares @ np.arange(1, self.masking_max_ngram + 1))

    def most_hidden(self, tokens: int, target: int) -> float:
        """Most masked tokens in a sample of ``tokens`` with target length ``target``."""
        return min(self.mask_prob * target, max(1, int(round(tokens * self.mask_prob))))


class Masking:
    """Draws the masked spans."""

    def __init__(self, rules: MaskingRules, words: WordPieces) -> None:
        """Apply ``rules`` to the vocabulary of ``words``."""
        self._rules = rules
        self._words = words
        steps = rules.run_shares.cumsum()
        steps /= steps[-1]
        self._steps: list[float] = steps.tolist()

    def word_starts(self, tokens: Ids) -> npt.NDArray[np.bool_]:
        """Mask of tokens that begin a word, or of all without whole words, [S].

        Raises:
            IndexError: a token is outside the vocabulary.
        """
        return self._words.starts(tokens) if self._rules.masking_do_full_word else np.ones(len(tokens), np.bool_)

    def runs(
        self, starts: npt.NDArray[np.bool_], most: float, random: np.random.RandomState
    ) -> Iterator[tuple[int, int]]:
        """Draw masked spans, which do not overlap; yields first position and end (exclusive).

        Draws from ``random`` between two spans, for example for the replacement of the first, change later spans.

        Args:
            starts: True where a word begins, bool [S]; the first position always begins a word.
            most: largest number of masked tokens.
            random: random generator.
        """
        bounds = [*np.flatnonzero(starts).tolist(), len(starts)]
        # A sample may begin within a word.
        if bounds[0] != 0:
            bounds.insert(0, 0)
        words = len(bounds) - 1
        order = np.arange(words)
        random.shuffle(order)
        hidden = bytearray(len(starts))
        count = 0
        for word in order.tolist():
            if count >= most:
                return
            first, size = bounds[word], self._words_in_run(random)
            stop = bounds[min(word + size, words)]
            # As Megatron-LM: a shorter run rather than none.
            while size and count + stop - first > most:
                size -= 1
                stop = bounds[min(word + size, words)]
            if size and hidden.find(1, first, stop) < 0:
                hidden[first:stop] = b"\1" * (stop - first)
                count += stop - first
                yield first, stop

    def _words_in_run(self, random: np.random.RandomState) -> int:
        if self._rules.masking_use_geometric_distribution:
            return min(int(random.geometric(GEOMETRIC)), self._rules.masking_max_ngram)
        # RandomState.choice with probabilities, without its repeated check of the probabilities.
        return bisect_right(self._steps, random.random_sample()) + 1


def check_tokens(tokens: npt.NDArray[np.integer[Any]], vocab_size: int, where: str) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        DataError: a token is outside; the message begins with ``where``.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise DataError(
            f"{where} has token {wrong}, but the tokenizer has {vocab_size:,} tokens; name the tokenizer of the data"
        )


def special_ids(pieces: Pieces, roles: tuple[str, ...], purpose: str) -> dict[str, int]:
    """Ids of the special tokens that ``purpose`` requires.

    Raises:
        DataError: the vocabulary lacks some of them.
    """
    found = {role: getattr(pieces.specials, role) for role in roles}
    missing = [role for role, token in found.items() if token is None]
    if missing:
        it = "it" if len(missing) == 1 else "them"
        raise DataError(
            f"{purpose}: the tokenizer has no {', no '.join(missing)} token; use a vocabulary that has {it}, or add "
            f"{it} by name with --tokenizer-special-tokens"
        )
    return found
