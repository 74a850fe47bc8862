"""Interface of a tokenizer, for any kind of vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from trainer.data.tokenizers.words import WordPieces

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Lengths = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens of several documents.

    Attributes:
        tokens: tokens of all documents, concatenated, int32 [T].
        lengths: number of tokens of each document, int64 [D]; sums to T.
    """

    tokens: Tokens
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tokens]:
        """Yield each document's tokens, as views."""
        start = 0
        for length in self.lengths.tolist():
            yield self.tokens[start : start + length]
            start += length


def join_arrays(documents: Sequence[np.ndarray[Any, Any]]) -> TokenBatch:
    """Return a batch from one integer array of ids per document, of any width."""
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
    return TokenBatch(tokens.view(np.int32) if tokens.dtype == np.uint32 else tokens.astype(np.int32), lengths)


def join_lists(documents: Sequence[Sequence[int]]) -> TokenBatch:
    """Return a batch from one list of ids per document."""
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    return TokenBatch(np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens; None if the vocabulary has no such token.

    Attributes:
        eod: ends a document.
        bos: begins a text.
        pad: padding.
        cls: stands for a whole sample (BERT).
        sep: ends a segment (BERT).
        mask: stands for a masked token (BERT).
        unk: stands for text that the vocabulary cannot encode.
        sentinels: <extra_id_0>, <extra_id_1>, ... in this order (T5).
    """

    eod: int | None = None
    bos: int | None = None
    pad: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    unk: int | None = None
    sentinels: tuple[int, ...] = ()


class Encoder(Protocol):
    """Conversion of text to ids, without the rest of a tokenizer, to save memory."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the tokens of each text, as Tokenizer.encode_batch does."""


class Tokenizer(Protocol):
    """Conversion of text to ids and back.

    A pickled tokenizer is opened again from its files when unpickled.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def specials(self) -> SpecialTokens:
        """Ids of special tokens."""

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of everything that determines the ids of a text, without paths."""

    @property
    def engine(self) -> str:
        """Name of the library that encodes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about the chosen engine."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without bos or eod.

        Names of special tokens in it are ordinary text.
        Lone surrogates, which UTF-8 cannot encode, are read as U+FFFD.
        """

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return ``encode`` of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special tokens.

        Bytes that are not UTF-8 become U+FFFD.
        """

    def word_pieces(self) -> WordPieces:
        """Return flags of the tokens that begin a word, for whole-word masking."""
