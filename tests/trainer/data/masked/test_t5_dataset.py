"""T5 samples: equal to samples recorded from Megatron-LM, and valid with other settings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.masked.masked_corpus import (
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
from trainer.data.masked.masking import MaskingRules
from trainer.data.masked.t5_dataset import T5Dataset, T5Sample
from trainer.data.samples.sources import split_sequences
from trainer.data.tokenizers.factory import open_tokenizer

PARTS = {
    **{"text_enc": "encoder_tokens", "text_dec": "decoder_tokens", "enc_mask": "encoder_mask"},
    **{"dec_mask": "decoder_mask", "labels": "labels", "loss_mask": "loss_mask", "truncated": "truncated"},
}
"""Megatron-LM's name of each field of a sample -> T5Sample's."""


@pytest.mark.parametrize("case", ["whole_words", "spans"])
def test_samples_are_megatrons(tmp_path: Path, recorded_masks: dict[str, Any], case: str) -> None:
    place = f"t5/{case}"
    asked = settings_of(recorded_masks, place)
    with IndexedDataset(write_recorded(tmp_path / "d", recorded_masks)) as tokens:
        data = T5Dataset(
            tokens,
            split_sequences(tokens.document_count, parse_split(asked["split"]))[0],
            asked["sequence_length"],
            asked["sequence_length_decoder"],
            asked["random_seed"],
            RecordedPieces(),
            rules_of(asked),
            asked["short_sequence_probability"],
            asked["samples"],
        )
        assert np.array_equal(data.rows, recorded_masks[f"{place}/rows"])
        samples = [data.sample(number) for number in range(len(recorded_masks[f"{place}/text_enc"]))]
    for theirs, ours in PARTS.items():
        assert np.array_equal([getattr(sample, ours) for sample in samples], recorded_masks[f"{place}/{theirs}"]), (
            theirs
        )


def test_special_tokens_in_the_text_are_never_masked(tmp_path: Path) -> None:
    """As recorded from Megatron-LM, a special token inside a span is dropped.

    The span continues after it.
    """
    # Token 3 is [SEP].
    text = [5, 6, 3, 7, 8, 9, 10, 3, 11, 12, 13, 14, 3, 15]
    recorded = [
        ([5, 205, 3, 206, 207, 3, 11, 12, 13, 208], [2, 205, 6, 206, 7, 8, 207, 9, 10, 208, 14, 15]),
        ([5, 205, 206, 3, 11, 12, 13, 207], [2, 205, 6, 7, 8, 206, 9, 10, 207, 14, 15]),
    ]
    with IndexedDataset(write_sentences(tmp_path / "d", [[text]], len(VOCABULARY))) as tokens:
        rules = MaskingRules(0.5, masking_max_ngram=3, masking_do_full_word=False, masking_use_longer_ngrams=True)
        data = T5Dataset(tokens, range(1), 16, 24, 1, RecordedPieces(), rules, short_seq_prob=0.0, num_samples=2)
        samples = [data.sample(number) for number in range(2)]
    served = [(one.encoder_tokens[one.encoder_mask], one.decoder_tokens[one.decoder_mask]) for one in samples]
    assert [(encoder.tolist(), decoder.tolist()) for encoder, decoder in served] == recorded


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return IndexedDataset(write_sentences(tmp_path_factory.mktemp("t5") / "d", made_documents(60, 4), len(VOCABULARY)))


def runs_of(sample: T5Sample, sentinels: tuple[int, ...] = SPECIALS.sentinels) -> dict[int, list[int]]:
    """Span of each sentinel, from the labels of the decoder."""
    found: dict[int, list[int]] = {}
    for token in sample.labels[sample.loss_mask].tolist()[:-1]:
        if token in sentinels:
            found[token] = []
        else:
            found[[*found][-1]].append(token)
    return found


def test_sentinels_stand_for_masked_spans(made: IndexedDataset) -> None:
    data = T5Dataset(made, range(60), 128, 64, 5, RecordedPieces(), short_seq_prob=0.2)
    for number in range(60):
        sample = data.sample(number)
        runs = runs_of(sample)
        assert [*runs] == list(SPECIALS.sentinels[: len(runs)])
        text = [
            part for token in sample.encoder_tokens[sample.encoder_mask].tolist() for part in runs.get(token, [token])
        ]
        first, last, target = data.rows[number].tolist()
        whole = np.concatenate([made[sentence] for sentence in range(first, last)]).tolist()
        assert text == whole[:target]
        assert sample.truncated == (len(whole) > target)
        said, asked = sample.decoder_tokens[sample.decoder_mask], sample.labels[sample.loss_mask]
        assert said[0] == SPECIALS.bos and asked[-1] == SPECIALS.eod
        assert said[1:].tolist() == asked[:-1].tolist()
        assert np.array_equal(sample.loss_mask, sample.decoder_mask)
        assert (sample.labels[~sample.loss_mask] == -1).all()
        assert not sample.encoder_tokens[~sample.encoder_mask].any()


def test_share_of_masked_tokens_and_lengths_of_spans(made: IndexedDataset) -> None:
    rules = MaskingRules(masking_do_full_word=False, masking_max_ngram=10, masking_use_geometric_distribution=True)
    data = T5Dataset(made, range(60), 128, 64, 5, RecordedPieces(), rules, short_seq_prob=0.0)
    samples = [data.sample(number) for number in range(400)]
    lengths = Counter(len(run) for sample in samples for run in runs_of(sample).values())
    hidden = sum(length * count for length, count in lengths.items())
    seen = sum(int(sample.encoder_mask.sum()) - len(runs_of(sample)) for sample in samples)
    # 15% of the 126 tokens of a full sample are 18.9, rounded down to 18 masked tokens.
    assert hidden / (hidden + seen) == pytest.approx(18 / 126, abs=0.004)
    assert max(lengths) == 10
    # The last span of a sample, about one in five, is shortened to the remaining number of tokens.
    shares = [lengths[length] / lengths.total() for length in range(1, 6)]
    wanted = 0.2 * 0.8 ** np.arange(5)
    assert np.abs(shares - wanted).max() < 0.08, shares
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("kind", ["unigram", "gpt2"])
def test_visible_and_masked_tokens_restore_the_text_in_any_script(
    vocabularies: Vocabularies, tmp_path: Path, kind: str
) -> None:
    settings = replace(vocabularies.settings(kind), vocab_extra_ids=40, tokenizer_special_tokens=("<s>", "<pad>"))
    tokenizer = open_tokenizer(settings)
    texts = [text for text in TEXTS if not text.isascii()]
    documents = [[tokenizer.encode(text)] for text in texts]
    words = tokenizer.word_pieces()
    found: list[str] = []
    runs: list[str] = []
    with IndexedDataset(write_sentences(tmp_path / "d", documents, tokenizer.vocab_size)) as tokens:
        data = T5Dataset(tokens, range(len(texts)), 128, 64, 5, tokenizer, short_seq_prob=0.0)
        for sample in map(data.sample, range(len(data))):
            by_sentinel = runs_of(sample, tokenizer.specials.sentinels)
            seen = sample.encoder_tokens[sample.encoder_mask].tolist()
            parts = [by_sentinel.get(token, [token]) for token in seen]
            whole = np.array([token for part in parts for token in part])
            is_hidden = np.array([at in by_sentinel for at, part in zip(seen, parts, strict=True) for _ in part])
            # Words are masked as a whole.
            assert not (is_hidden[1:] != is_hidden[:-1])[~words.starts(whole)[1:]].any()
            found.append(tokenizer.decode(whole.tolist()))
            runs += [tokenizer.decode(run) for run in by_sentinel.values()]
    assert sorted(found) == sorted(texts)
    for script in ("\u3041-\u9fff", "\uac00-\ud7a3"):
        assert any(re.fullmatch(rf"[{script}]{{2,}}", run.strip()) for run in runs), runs


def test_less_is_masked_if_sentinels_or_decoder_length_are_short(made: IndexedDataset) -> None:
    rules = MaskingRules(masking_max_ngram=2)
    few = RecordedPieces(replace(SPECIALS, sentinels=SPECIALS.sentinels[:15]))
    for pieces, decoder in ((few, 64), (RecordedPieces(), 34)):
        data = T5Dataset(made, range(60), 128, decoder, 5, pieces, rules)
        samples = [data.sample(number) for number in range(100)]
        most = max(len(runs_of(sample)) for sample in samples)
        fullest = max(int(sample.decoder_mask.sum()) for sample in samples)
        assert most == 15 if decoder == 64 else most > 12
        assert fullest <= decoder
        assert all(sample.decoder_mask.sum() == sample.loss_mask.sum() for sample in samples)
        assert all(token in runs_of(s) for s in samples for token in s.encoder_tokens if token in SPECIALS.sentinels)


def test_unusable_settings_are_refused(made: IndexedDataset) -> None:
    def refused(match: str, specials: Any = SPECIALS, encoder: int = 128, decoder: int = 64) -> None:
        with pytest.raises(DataError, match=match):
            T5Dataset(made, range(60), encoder, decoder, 3, RecordedPieces(specials))

    refused(r"encoder_seq_length: 3 is too short; use 4 or more", encoder=3)
    refused(r"encoder_seq_length: 2,000,000 tokens are too many for a sample", encoder=2_000_000)
    refused(r"decoder_seq_length: 0 is too short; use 1 or more", decoder=0)
    refused(r"decoder_seq_length: 2,000,000 tokens are too many for a sample", decoder=2_000_000)
    refused(r"decoder_seq_length: 20 is too short .* about 18 in 5 spans; use 37", decoder=20)
    refused(r"has 0 sentinels \(<extra_id_0>, ...\).* --vocab-extra-ids 100", replace(SPECIALS, sentinels=()))
    refused(r"has 3 sentinels .* about 5 masked spans", replace(SPECIALS, sentinels=SPECIALS.sentinels[:3]))
    refused(r"T5 samples: the tokenizer has no eod token; .* has it", replace(SPECIALS, eod=None))
    refused(r"T5 samples: the tokenizer has no bos token", replace(SPECIALS, bos=None, pad=None))
    own = T5Dataset(made, range(60), 128, 64, 3, RecordedPieces(replace(SPECIALS, bos=None)))
    assert own.sample(0).decoder_tokens[0] == SPECIALS.pad
    with pytest.raises(DataError, match="sample 0 has token"):
        T5Dataset(made, range(60), 128, 64, 3, RecordedPieces(vocab_size=40)).sample(0)
