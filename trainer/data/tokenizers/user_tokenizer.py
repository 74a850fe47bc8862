"""A tokenizer of the user's own, ``data.tokenizer_function``; trainer/hooks/protocols.py has its form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainer.config.errors import ConfigError
from trainer.data.errors import DataError
from trainer.data.tokenizers.tokenizer import SpecialTokens, TokenBatch, join_lists
from trainer.data.tokenizers.words import WordPieces
from trainer.hooks.user_function import HookError, load_function

T = TypeVar("T")
_PROBE = ("The quick brown fox, 0123456789.\n", "Grüße, 東京!", " two  spaces\tand a tab", "def f(x):\n    return x")
"""Texts whose tokens are part of the fingerprint, so that other code is noticed in most cases."""


def open_user_tokenizer(place: str) -> UserTokenizer:
    """Call the function ``module:function``, which returns the tokenizer.

    Raises:
        DataError: there is no such function, it fails, or it returns something else.
    """
    try:
        made = load_function("data.tokenizer_function", place)()
    except (ConfigError, HookError) as error:
        raise DataError(str(error)) from error
    return UserTokenizer(place, made)


class UserTokenizer:
    """The user's object behind the interface of a Tokenizer."""

    engine = "a function"
    notes = ()

    def __init__(self, place: str, made: Any) -> None:
        """Check the object, and encode some texts.

        Raises:
            DataError: the object lacks something, or its tokens are not in its vocabulary.
        """
        self._place, self._made = place, made
        absent = [name for name in ("encode", "decode", "vocab_size", "eod") if not hasattr(made, name)]
        if absent:
            raise self._error(f"returned {made!r} without {', '.join(absent)}")
        self._vocab_size, self._eod = made.vocab_size, made.eod
        if not isinstance(self._vocab_size, int) or self._vocab_size < 1:
            raise self._error(f"has the vocab_size {self._vocab_size!r}; it is the number of ids")
        if self._eod is not None and not (isinstance(self._eod, int) and 0 <= self._eod < self._vocab_size):
            raise self._error(f"has the eod {self._eod!r}; it is an id below vocab_size {self._vocab_size}, or None")
        probe = [self.encode(text) for text in _PROBE]
        content = json.dumps([place, self._vocab_size, self._eod, probe])
        self._sha256 = hashlib.sha256(content.encode()).hexdigest()

    def __reduce__(self) -> tuple[Callable[[str], UserTokenizer], tuple[str]]:
        return open_user_tokenizer, (self._place,)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return int(self._vocab_size)

    @property
    def specials(self) -> SpecialTokens:
        """The end-of-document token only."""
        return SpecialTokens(eod=self._eod)

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if there is none."""
        return self.specials.eod

    @property
    def sha256(self) -> str:
        """Digest of the function's name, the sizes, and the tokens of a few texts."""
        return self._sha256

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``.

        Raises:
            DataError: the user's code fails, or returns something else than ids of the vocabulary.
        """
        tokens = self._call("encode", lambda: [int(token) for token in self._made.encode(text)])
        wrong = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise self._error(f"encodes a text as token {wrong}, which is not below vocab_size {self._vocab_size}")
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return ``encode`` of each text."""
        return join_lists([self.encode(text) for text in texts])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without ends of documents."""
        plain = [int(token) for token in tokens if token != self._eod]
        return self._call("decode", lambda: str(self._made.decode(plain)))

    def word_pieces(self) -> WordPieces:
        """Refuse: only the files of a vocabulary tell which tokens begin a word."""
        raise self._error("cannot be used for bert and t5, which mask whole words; name a tokenizer's files")

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._error(f"fails to {name}: {type(error).__name__}: {error}") from error

    def _error(self, problem: str) -> DataError:
        return DataError(f"data.tokenizer_function: {self._place} {problem}")
