"""Corpora of sentences for masked samples, recorded and generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.record_megatron_order import MaskedTokenizer, masked_vocabulary
from tests.trainer.data.token_files import write_sequences
from trainer.data.masked.masking import MaskingRules
from trainer.data.tokenizers.tokenizer import SpecialTokens
from trainer.data.tokenizers.words import WordPieces, words_by_prefix

RECORDED = Path(__file__).parents[3] / "recorded" / "megatron_data" / "masked.npz"
VOCABULARY = masked_vocabulary()
SPECIALS = SpecialTokens(
    eod=MaskedTokenizer.eos,
    bos=MaskedTokenizer.bos,
    pad=MaskedTokenizer.pad,
    cls=MaskedTokenizer.cls,
    sep=MaskedTokenizer.sep,
    mask=MaskedTokenizer.mask,
    sentinels=tuple(token for token, piece in enumerate(VOCABULARY) if piece.startswith("<extra_id_")),
)
FIRST_WORD = 5
"""Smaller ids are special tokens."""


@dataclass(frozen=True)
class RecordedPieces:
    """Vocabulary of the recorded samples, or a variant with other special tokens."""

    specials: SpecialTokens = SPECIALS
    vocab_size: int = len(VOCABULARY)

    def word_pieces(self) -> WordPieces:
        return words_by_prefix(VOCABULARY, "##")


def settings_of(recorded: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(recorded[f"{name}/settings"]))
    return found


def write_sentences(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> Path:
    """Write an indexed dataset of ``documents``, which are lists of sentences of tokens."""
    write_sequences(prefix, documents, vocab_size)
    return prefix


def write_recorded(prefix: Path, recorded: dict[str, Any]) -> Path:
    """Write the dataset of the recorded samples."""
    sentences = np.split(recorded["tokens"], np.cumsum(recorded["sentences"])[:-1])
    ends = np.cumsum(recorded["sentences_per_document"]).tolist()
    documents = [
        [part.tolist() for part in sentences[start:end]] for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return write_sentences(prefix, documents, len(VOCABULARY))


def made_documents(count: int, seed: int) -> list[list[list[int]]]:
    """Random documents of the recorded vocabulary.

    A document has five to nine sentences of 10 to 40 words.
    """
    random = np.random.RandomState(seed)
    return [
        [
            random.randint(FIRST_WORD, SPECIALS.sentinels[0], random.randint(10, 41)).tolist()
            for _ in range(random.randint(5, 10))
        ]
        for _ in range(count)
    ]


def rules_of(asked: dict[str, Any]) -> MaskingRules:
    names = ("max_ngram", "do_full_word", "use_longer_ngrams", "use_geometric_distribution")
    return MaskingRules(asked["masking_probability"], *(asked[f"masking_{name}"] for name in names))
