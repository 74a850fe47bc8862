"""Text that is already ids: Megatron-LM's NullTokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from trainer.data.errors import DataError
from trainer.data.tokenizers.tokenizer import SpecialTokens, TokenBatch, join_lists
from trainer.data.tokenizers.words import WordPieces

_SHOWN = 60
"""Characters of a word that are shown of it."""


class NullTokenizer:
    """Text that is already ids in decimal, separated by spaces.

    ``numbers`` ids 0 .. numbers - 1 and one more, which ends a document.
    """

    engine = "none"
    notes = ()

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers

    @property
    def vocab_size(self) -> int:
        """The numbers and the end of a document."""
        return self._numbers + 1

    @property
    def specials(self) -> SpecialTokens:
        """The end of a document alone."""
        return SpecialTokens(eod=self._numbers)

    @property
    def eod(self) -> int | None:
        """The id after the last number."""
        return self._numbers

    @property
    def sha256(self) -> str:
        """Digest of the size, which is all there is."""
        return hashlib.sha256(f"NullTokenizer {self._numbers}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The numbers that ``text`` spells.

        Raises:
            DataError: something in it is no number of this vocabulary.
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
        """``encode`` of each text."""
        return join_lists([self.encode(text) for text in texts])

    def decode(self, tokens: Sequence[int]) -> str:
        """The numbers, separated by spaces, without the ends of documents."""
        return " ".join(str(token) for token in tokens if token != self._numbers)

    def word_pieces(self) -> WordPieces:
        """Every number is a word."""
        return WordPieces(np.ones(self.vocab_size, np.bool_), np.zeros(self.vocab_size, np.bool_))


def _is_number(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True


def _shown(word: str) -> str:
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}... ({len(word):,} characters)"
