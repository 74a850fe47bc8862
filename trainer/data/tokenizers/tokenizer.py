"""What the data side asks of a tokenizer, whatever its files are."""

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
    """The tokens of several documents.

    Attributes:
        tokens: of all documents, one after the other, int32 [T].
        lengths: how many are each document's, int64 [D]; sums to T.
    """

    tokens: Tokens
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tokens]:
        """Each document's tokens, as views."""
        start = 0
        for length in self.lengths.tolist():
            yield self.tokens[start : start + length]
            start += length


def join_arrays(documents: Sequence[np.ndarray[Any, Any]]) -> TokenBatch:
    """A batch of one array of ids per document, of any integer type that holds them."""
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
    return TokenBatch(tokens.view(np.int32) if tokens.dtype == np.uint32 else tokens.astype(np.int32), lengths)


def join_lists(documents: Sequence[Sequence[int]]) -> TokenBatch:
    """A batch of one list of ids per document."""
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    return TokenBatch(np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning of their own; None where the vocabulary has no such token.

    Attributes:
        eod: ends a document.
        bos: begins a text.
        pad: fills up.
        cls: stands for a whole sample (BERT).
        sep: ends a segment (BERT).
        mask: stands for a hidden token (BERT).
        unk: stands for what the vocabulary does not know.
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
    """Text to ids, and no more than that takes."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Tokens of each text, as of Tokenizer."""


class Tokenizer(Protocol):
    """Text to ids and back. It can be pickled, and is then opened again from its files on the other side."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def specials(self) -> SpecialTokens:
        """Ids with a meaning of their own."""

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""

    @property
    def sha256(self) -> str:
        """Digest of everything that decides which ids a text becomes, in hexadecimal: not of any path."""

    @property
    def engine(self) -> str:
        """Name of the library that encodes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about the choice of the engine."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without beginning or end tokens; names of special tokens in it are ordinary text.

        Halves of surrogate pairs that stand alone, which no UTF-8 can say, are read as U+FFFD.
        """

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """``encode`` of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out; bytes that are not UTF-8 become U+FFFD."""

    def word_pieces(self) -> WordPieces:
        """Which tokens begin a word, for masking whole words."""
