"""NullTokenizer of Megatron-LM, for text that already consists of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from trainer.data.errors import DataError
from trainer.data.tokenizers.tokenizer import SpecialTokens, TokenBatch, join_lists
from trainer.data.tokenizers.words import WordPieces

_SHOWN = 60
"""Maximum characters of a word in a message."""


class NullTokenizer:
    """Tokenizer of decimal ids separated by spaces.

    The ids are 0 .. ``numbers`` - 1, and ``numbers``, which ends a document.
    """

    engine = "none"
    notes = ()

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers

    @property
    def vocab_size(self) -> int:
        """Number of ids, including the end-of-document token."""
        return self._numbers + 1

    @property
    def specials(self) -> SpecialTokens:
        """The end-of-document token only."""
        return SpecialTokens(eod=self._numbers)

    @property
    def eod(self) -> int | None:
        """End-of-document token: the id after the last number."""
        return self._numbers

    @property
    def sha256(self) -> str:
        """Digest of the vocabulary size, the only setting."""
        return hashlib.sha256(f"NullTokenizer {self._numbers}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the numbers in ``text``.

        Raises:
            DataError: a word is not a number of this vocabulary.
        """
        words = text.split()
        try:
            ids = [int(word) for word in words]
        except ValueError:
            word = next(word for word in words if not _is_number(word))
            raise DataError(f"NullTokenizer reads decimal ids separated by spaces, not {_shown(word)!r}") from None
        wrong = next((word for word, token in zip(words, ids, strict=True) if not 0 <= token < self._numbers), None)
        if wrong is not None:
            raise DataError(f"NullTokenizer takes the numbers 0 to {self._numbers - 1}, not {_shown(wrong)}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return ``encode`` of each text."""
        return join_lists([self.encode(text) for text in texts])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the numbers separated by spaces, without end-of-document tokens."""
        return " ".join(str(token) for token in tokens if token != self._numbers)

    def word_pieces(self) -> WordPieces:
        """Return flags by which every number is a word."""
        return WordPieces(np.ones(self.vocab_size, np.bool_), np.zeros(self.vocab_size, np.bool_))


def _is_number(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True


def _shown(word: str) -> str:
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}... ({len(word):,} characters)"
