"""BERT samples: equal to samples recorded from Megatron-LM, and valid with any vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.masked.masked_corpus import (
    FIRST_WORD,
    SPECIALS,
    VOCABULARY,
    RecordedPieces,
    made_documents,
    rules_of,
    settings_of,
    write_recorded,
    write_sentences,
)
from tests.trainer.data.vocabularies import TEXTS, Vocabularies
from trainer.config.blends import parse_split
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.masked.bert_dataset import BertDataset, BertSample
from trainer.data.masked.masking import MaskingRules
from trainer.data.samples.sources import split_sequences
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.words import words_by_prefix

PARTS = {
    "text": "tokens",
    **{name: name for name in ("types", "labels", "is_random", "padding_mask", "loss_mask", "truncated")},
}
"""Megatron-LM's name of each field of a sample -> BertSample's."""


@pytest.mark.parametrize("case", ["plain", "whole_words", "longer", "spans", "one_part"])
def test_samples_are_megatrons(tmp_path: Path, recorded_masks: dict[str, Any], case: str) -> None:
    place = f"bert/{case}"
    asked = settings_of(recorded_masks, place)
    with IndexedDataset(write_recorded(tmp_path / "d", recorded_masks)) as tokens:
        data = BertDataset(
            tokens,
            split_sequences(tokens.document_count, parse_split(asked["split"]))[0],
            asked["sequence_length"],
            asked["random_seed"],
            RecordedPieces(),
            rules_of(asked),
            asked["short_sequence_probability"],
            asked["classification_head"],
            asked["samples"],
        )
        assert np.array_equal(data.rows, recorded_masks[f"{place}/rows"])
        assert len(data) == len(data.rows)
        samples = [data.sample(number) for number in range(len(recorded_masks[f"{place}/text"]))]
    for theirs, ours in PARTS.items():
        assert np.array_equal([getattr(sample, ours) for sample in samples], recorded_masks[f"{place}/{theirs}"]), (
            theirs
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return IndexedDataset(
        write_sentences(tmp_path_factory.mktemp("bert") / "d", made_documents(60, 4), len(VOCABULARY))
    )


def text_of(sample: BertSample) -> list[int]:
    """Original text before masking, without special tokens and padding."""
    whole = np.where(sample.loss_mask, sample.labels, sample.tokens)
    return [token for token in whole.tolist() if token >= FIRST_WORD]


def test_shares_of_masked_tokens(made: IndexedDataset) -> None:
    data = BertDataset(made, range(60), 128, 5, RecordedPieces(), short_seq_prob=0.0)
    samples = [data.sample(number) for number in range(1000)]
    tokens, labels, hidden = (
        np.stack([getattr(s, name) for s in samples]) for name in ("tokens", "labels", "loss_mask")
    )
    filled = np.stack([sample.padding_mask for sample in samples])
    # A masked token may also become [PAD].
    assert 0 < (hidden & ~filled).sum() < 20 and (tokens[~filled] == SPECIALS.pad).all()
    filled |= hidden
    # 15% of the target of 125 tokens are 18.75, rounded down to 18 masked tokens.
    assert hidden.sum() / filled.sum() == pytest.approx(18 / 128, abs=0.003)
    now, before = tokens[hidden], labels[hidden]
    assert (now == SPECIALS.mask).mean() == pytest.approx(0.8, abs=0.015)
    assert (now == before).mean() == pytest.approx(0.1, abs=0.015)
    other = now[(now != SPECIALS.mask) & (now != before)]
    assert len(other) / len(now) == pytest.approx(0.1, abs=0.015)
    assert len(np.unique(other)) > len(VOCABULARY) / 2
    assert (labels[~hidden] == -1).all() and (labels[hidden] >= FIRST_WORD).all()
    assert np.mean([sample.is_random for sample in samples]) == pytest.approx(0.5, abs=0.08)
    # All positions are equally likely.
    whole = hidden[filled.all(axis=1)]
    assert len(whole) > 500 and whole[:, 1:64].mean() == pytest.approx(whole[:, 64:127].mean(), rel=0.05)


def test_parts_are_neighbours_of_one_document(made: IndexedDataset) -> None:
    data = BertDataset(made, range(60), 100, 5, RecordedPieces(), short_seq_prob=0.3)
    for number in range(60):
        sample = data.sample(number)
        first, last, target = data.rows[number].tolist()
        length = int(np.flatnonzero(sample.padding_mask)[-1]) + 1
        cuts = np.flatnonzero(sample.tokens[:length] == SPECIALS.sep).tolist()
        assert sample.tokens[0] == SPECIALS.cls and cuts[-1] == length - 1 and len(cuts) == 2
        assert sample.types.tolist() == [0] * (cuts[0] + 1) + [1] * (length - cuts[0] - 1) + [0] * (100 - length)
        assert not sample.tokens[length:].any()
        text = np.concatenate([made[sentence] for sentence in range(first, last)]).tolist()
        assert sample.truncated == (len(text) > target)
        assert length == 3 + min(len(text), target)
        whole = np.where(sample.loss_mask, sample.labels, sample.tokens)
        parts = [whole[1 : cuts[0]].tolist(), whole[cuts[0] + 1 : cuts[1]].tolist()]
        one, two = reversed(parts) if sample.is_random else parts
        joined = [text[at : at + len(one)] == one for at in range(len(text))]
        after = [text[at : at + len(two)] == two for at in range(len(text))]
        assert any(joined) and any(after) and joined.index(True) + len(one) <= len(text) - after[::-1].index(True)
        assert sample.truncated or one + two == text


def test_documents_of_one_sentence_are_used_without_parts(tmp_path: Path) -> None:
    documents = [[list(range(5 + number, 45 + number))] for number in range(30)]
    with IndexedDataset(write_sentences(tmp_path / "d", documents, len(VOCABULARY))) as tokens:
        data = BertDataset(tokens, range(30), 64, 3, RecordedPieces(), bert_binary_head=False, short_seq_prob=0.0)
        assert len(data) == 30
        samples = [data.sample(number) for number in range(30)]
        assert sorted(map(text_of, samples)) == [document[0] for document in documents]
        assert not any(sample.types.any() or sample.is_random or sample.truncated for sample in samples)
        again = data.sample(30)
        assert any(np.array_equal(np.sort(text_of(again)), np.sort(text_of(sample))) for sample in samples)
        with pytest.raises(DataError, match="30 have fewer than 2 sentences; .* use samples of one part"):
            BertDataset(tokens, range(30), 64, 3, RecordedPieces())


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "gpt2"])
def test_whole_words_are_masked_in_every_vocabulary(vocabularies: Vocabularies, tmp_path: Path, kind: str) -> None:
    names = () if kind == "wordpiece" else ("[CLS]", "[SEP]", "[MASK]")
    tokenizer = open_tokenizer(replace(vocabularies.settings(kind), tokenizer_special_tokens=names))
    sentences = [tokenizer.encode(text) for text in TEXTS]
    documents = [sentences[first : first + 8] for first in range(0, len(sentences), 8)]
    words = tokenizer.word_pieces()
    runs: list[str] = []
    with IndexedDataset(write_sentences(tmp_path / "d", documents, tokenizer.vocab_size)) as tokens:
        data = BertDataset(tokens, range(len(documents)), 512, 3, tokenizer, short_seq_prob=0.0)
        for number in range(20):
            sample = data.sample(number)
            filled = sample.padding_mask | sample.loss_mask
            whole = np.where(sample.loss_mask, sample.labels, sample.tokens)[filled]
            starts, hidden = words.starts(whole), sample.loss_mask[filled]
            # Words are masked as a whole, and often with their neighbours.
            assert (hidden[:-1] & hidden[1:] & starts[1:]).sum() > hidden.sum() / 8
            assert not sample.truncated and (hidden[1:] == hidden[:-1])[~starts[1:]].all()
            begins = np.flatnonzero(starts & hidden).tolist()
            ends = [begin + 1 + int(np.flatnonzero([*starts[begin + 1 :], True])[0]) for begin in begins]
            runs += [
                tokenizer.decode(whole[begin:end].tolist()).strip() for begin, end in zip(begins, ends, strict=True)
            ]
    assert any(len(run) > 8 and run.isalpha() and run.isascii() for run in runs), runs
    # This WordPiece vocabulary has no Japanese.
    assert kind == "wordpiece" or any("\u3040" <= run[:1] <= "\u9fff" for run in runs), runs


def test_unusable_settings_are_refused(made: IndexedDataset) -> None:
    everything = RecordedPieces()
    with pytest.raises(DataError, match=r"seq_length: 10,000,000,000 tokens are too many .*; use 1,048,576 or fewer"):
        BertDataset(made, range(60), 10**10, 3, RecordedPieces())
    with pytest.raises(DataError, match=r"seq_length: 4 is too short .* use 5 or more"):
        BertDataset(made, range(60), 4, 3, everything)
    bare = RecordedPieces(replace(SPECIALS, mask=None, sep=None))
    with pytest.raises(DataError, match=r"BERT samples: the tokenizer has no sep, no mask token; .* has them"):
        BertDataset(made, range(60), 64, 3, bare)
    small = RecordedPieces(vocab_size=40)
    with pytest.raises(DataError, match=r"d: sample 0 has token \d+, but the tokenizer has 40 tokens; name"):
        BertDataset(made, range(60), 64, 3, small).sample(0)
    short = BertDataset(made, range(60), 5, 3, everything, short_seq_prob=1.0)
    assert {int((sample.padding_mask | sample.loss_mask).sum()) for sample in map(short.sample, range(50))} == {5}


def test_the_rest_of_a_word_is_masked_with_the_word(tmp_path: Path) -> None:
    # Truncation may leave a part that begins within a word; Megatron-LM joins this rest to the previous part.
    pieces = words_by_prefix(VOCABULARY, "##")
    inside = next(token for token, piece in enumerate(VOCABULARY) if piece.startswith("##"))
    outside = next(token for token, piece in enumerate(VOCABULARY) if piece.startswith("word"))
    assert pieces.starts(np.array([outside, inside, outside])).tolist() == [True, False, True]
    documents = [[[outside] * 6, [inside] * 6] for _ in range(20)]
    rules = MaskingRules(0.6, masking_max_ngram=1)
    with IndexedDataset(write_sentences(tmp_path / "d", documents, len(VOCABULARY))) as tokens:
        data = BertDataset(tokens, range(20), 64, 3, RecordedPieces(), rules, short_seq_prob=0.0)
        samples = [data.sample(number) for number in range(20)]
    hidden = [int((sample.labels == inside).sum()) for sample in samples]
    assert set(hidden) == {0, 6}
    # [CLS] and six words precede the [SEP].
    ahead = [
        (count, sample.loss_mask[6]) for count, sample in zip(hidden, samples, strict=True) if not sample.is_random
    ]
    assert set(ahead) == {(0, False), (6, True)}
