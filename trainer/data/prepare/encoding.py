"""Encode documents to the tokens, sequence lengths and document ends of an indexed dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.prepare.documents import Text
from trainer.data.prepare.sentences import split_sentences
from trainer.data.tokenizers.tokenizer import Encoder

BATCH_CHARACTERS = 1 << 18
"""Characters passed to a tokenizer at a time; more only for a longer document."""


@dataclass(frozen=True)
class Recipe:
    """Conversion of a document to sequences.

    Attributes:
        keys: JSON keys or columns of the texts.
        append_eod: end the document with the end-of-document token, unless it is empty.
        sentences: make each sentence a sequence.
        keep_newlines: keep the white space after a sentence; otherwise it is dropped.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    sentences: bool = False
    keep_newlines: bool = False


@dataclass(frozen=True, eq=False)
class Block:
    """Tokens of some documents under one key.

    Attributes:
        tokens: tokens of all sequences, concatenated [T].
        lengths: lengths of the sequences, none 0, int64 [S]; sums to T.
        ends: for each document, the number of sequences up to its end, int64 [D].
        text_bytes: UTF-8 bytes of the documents' text.
    """

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    text_bytes: int


def encode_documents(texts: Sequence[Text], tokenizer: Encoder, recipe: Recipe) -> Block:
    """Encode documents as Megatron-LM's preprocess_data.py does.

    A text is a sequence. Each sentence of a list or, by ``recipe``, of a text is also a sequence. Texts without tokens
    are left out. The end-of-document token belongs to the last sequence; an empty document gets none.

    Raises:
        DataError: the tokenizer returns a token outside its vocabulary.
    """
    strings: list[str] = []
    counts = np.ones(len(texts), np.int64)
    for place, text in enumerate(texts):
        if isinstance(text, str):
            if not recipe.sentences:
                strings.append(text)
                continue
            text = split_sentences(text, recipe.keep_newlines)
        strings += text
        counts[place] = len(text)
    # One call: libraries encode the texts of a batch side by side.
    batch = tokenizer.encode_batch(strings)
    tokens, lengths = batch.tokens, batch.lengths
    # As Megatron-LM: a text without tokens leaves no sequence, and no end of a document.
    filled = lengths > 0
    documents = np.repeat(np.arange(len(texts)), counts)[filled]
    lengths = lengths[filled]
    ends = np.cumsum(np.bincount(documents, minlength=len(texts)))
    if recipe.append_eod and len(documents):
        assert tokenizer.eod is not None
        last = np.append(documents[1:] != documents[:-1], True)
        tokens = np.insert(tokens, np.cumsum(lengths)[last], tokenizer.eod)
        lengths = lengths + last
    _check_range(tokens, tokenizer.vocab_size)
    return Block(tokens, lengths, ends, sum(map(_utf8_length, strings)))


def _check_range(tokens: npt.NDArray[Any], vocab_size: int) -> None:
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise DataError(f"the tokenizer returns token {wrong}; its vocabulary of {vocab_size} ends at {vocab_size - 1}")


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def batches(documents: Iterable[tuple[Text, ...]]) -> Iterator[list[tuple[Text, ...]]]:
    """Yield ``documents`` in lists of about BATCH_CHARACTERS."""
    batch: list[tuple[Text, ...]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
