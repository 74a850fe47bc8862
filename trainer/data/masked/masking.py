"""Which tokens of a sample are hidden: words and runs of words, drawn as Megatron-LM draws them.

Devlin et al. 2018 (arXiv:1810.04805) hide single pieces, the authors' later code whole words; Joshi et al. 2019
(SpanBERT, arXiv:1907.10529, section 3.1) runs of words whose number is geometric. Drawn number by number as in
Megatron-LM (megatron/core/datasets/masked_dataset.py), so that the same seed hides the same. What a word is, the
vocabulary says (trainer.data.tokenizers.words): with one that marks what continues a word with ##, words are
Megatron-LM's; it knows no other kind.
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
"""Parameter of SpanBERT's distribution: 3.8 words on average, if no run has more than ten."""
LONGEST_RUN = 10_000
"""Words; a share is worked out for each length of a run."""

Ids = npt.NDArray[np.int64]


class Pieces(Protocol):
    """What hiding tokens asks of a tokenizer; every Tokenizer has it."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def specials(self) -> SpecialTokens:
        """Ids with a meaning of their own."""

    def word_pieces(self) -> WordPieces:
        """Which tokens begin a word."""


@dataclass(frozen=True)
class MaskingRules:
    """How much is hidden, and in what pieces. The names are Megatron-LM's.

    Raises:
        DataError: a number lies outside its range.
    """

    mask_prob: float = 0.15
    """Share of the tokens that are hidden."""
    masking_max_ngram: int = 3
    """Words that are hidden in one run at most."""
    masking_do_full_word: bool = True
    """Words are hidden whole; else each token is a word."""
    masking_use_longer_ngrams: bool = False
    """Runs of n words are as frequent as 1 / (max - n + 1) says; else as 1 / n."""
    masking_use_geometric_distribution: bool = False
    """The number of words in a run is geometric, up to the largest."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise DataError(f"mask_prob: {self.mask_prob} is no share between 0 and 1; 0.15 is usual")
        if not 1 <= self.masking_max_ngram <= LONGEST_RUN:
            raise DataError(
                f"masking_max_ngram: {self.masking_max_ngram:,} words are no run; give 1 or more, at most "
                f"{LONGEST_RUN:,}"
            )

    @cached_property
    def run_shares(self) -> npt.NDArray[np.float64]:
        """How frequent runs of 1, 2, ... words are."""
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
        """Words in a run on average."""
        return float(self.run_shares @ np.arange(1, self.masking_max_ngram + 1))

    def most_hidden(self, tokens: int, target: int) -> float:
        """How many of ``tokens`` tokens may be hidden in a sample that aimed at ``target``."""
        return min(self.mask_prob * target, max(1, int(round(tokens * self.mask_prob))))


class Masking:
    """Draws the runs of tokens that are hidden."""

    def __init__(self, rules: MaskingRules, words: WordPieces) -> None:
        """``rules``, for the vocabulary of ``words``."""
        self._rules = rules
        self._words = words
        steps = rules.run_shares.cumsum()
        steps /= steps[-1]
        self._steps: list[float] = steps.tolist()

    def word_starts(self, tokens: Ids) -> npt.NDArray[np.bool_]:
        """Where in ``tokens`` [S] begins what is only hidden together, bool [S].

        Raises:
            IndexError: a token is outside the vocabulary.
        """
        return self._words.starts(tokens) if self._rules.masking_do_full_word else np.ones(len(tokens), np.bool_)

    def runs(
        self, starts: npt.NDArray[np.bool_], most: float, random: np.random.RandomState
    ) -> Iterator[tuple[int, int]]:
        """First place and end of one hidden run after another, none of which overlap.

        Whoever draws from ``random`` between two runs, as for what replaces the first, changes the ones that follow.

        Args:
            starts: where words begin, bool [S]; the first place does, whatever it says.
            most: no more tokens are hidden.
            random: where the numbers come from.
        """
        bounds = [*np.flatnonzero(starts).tolist(), len(starts)]
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
        # What RandomState.choice does with probabilities, without looking at them again each time.
        return bisect_right(self._steps, random.random_sample()) + 1


def check_tokens(tokens: npt.NDArray[np.integer[Any]], vocab_size: int, where: str) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        DataError: there is one; names ``where``.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise DataError(
            f"{where} holds token {wrong}, but the tokenizer has {vocab_size:,}; name the one the data was prepared "
            "with"
        )


def special_ids(pieces: Pieces, roles: tuple[str, ...], purpose: str) -> dict[str, int]:
    """The ids of the tokens that ``purpose`` cannot do without.

    Raises:
        DataError: the vocabulary lacks some.
    """
    found = {role: getattr(pieces.specials, role) for role in roles}
    missing = [role for role, token in found.items() if token is None]
    if missing:
        it = "it" if len(missing) == 1 else "them"
        raise DataError(
            f"{purpose}: the tokenizer has no {', no '.join(missing)} token; take a vocabulary that has {it}, or add "
            f"{it} by name with --tokenizer-special-tokens"
        )
    return found
