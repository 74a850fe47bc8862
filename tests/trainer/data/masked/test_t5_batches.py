"""Micro-batches of T5: samples of prepared sentences or mock data, the same for every number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.data.masked.masked_corpus import (
    SPECIALS,
    VOCABULARY,
    RecordedPieces,
    made_documents,
    write_sentences,
)
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest
from trainer.data.loading.build import build_data
from trainer.data.masked.masking import MaskingRules
from trainer.data.masked.mock import END, FIRST_SENTINEL, SPAN, MockT5Samples
from trainer.data.masked.t5_dataset import T5Dataset
from trainer.data.samples.mock import MockDataset
from trainer.data.tokenizers.factory import load_tokenizer
from trainer.planning.build_config import build_config

ENCODER, DECODER, SEED = 64, 32, 5
# The sentinels come from --vocab-extra-ids, with the same numbers.
WORDS = VOCABULARY[: SPECIALS.sentinels[0]]


def config(**data: object) -> TrainConfig:
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "architecture": "t5"}
    return build_config(
        {
            "model": {**model, "position_embedding_type": "relative", "disable_bias_linear": True},
            "training": {
                "train_iters": 4,
                "seq_length": ENCODER,
                "decoder_seq_length": DECODER,
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "seed": SEED,
            },
            "optimizer": {"lr": 1e-3},
            "data": data,
        }
    )


def test_batches_are_the_samples_of_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    prefix = write_sentences(tmp_path / "corpus", made_documents(60, 1), len(VOCABULARY))
    prepared = config(
        train_data_path=[str(prefix)],
        tokenizer_type="BertWordPieceCase",
        vocab_file=str(tmp_path / "vocab.txt"),
        vocab_extra_ids=50,
        mask_prob=0.2,
        short_seq_prob=0.3,
    )
    rules = MaskingRules(0.2, 10, masking_use_geometric_distribution=True)
    with IndexedDataset(prefix) as tokens:
        documents = range(tokens.document_count)
        dataset = T5Dataset(tokens, documents, ENCODER, DECODER, SEED, RecordedPieces(), rules, 0.3)
        samples = [dataset.sample(number) for number in range(8, 16)]
    for dp in (1, 2):
        found = [batch for rank in range(dp) for batch in build_data(prepared, rank, dp).micro_batches("train", 8)]
        found.sort(key=lambda batch: batch.index)
        assert [batch.index for batch in found] == list(range(4))
        for batch in found:
            for row, sample in enumerate(samples[2 * batch.index : 2 * batch.index + 2]):
                assert batch.encoder_tokens is not None and batch.encoder_mask is not None
                assert batch.encoder_tokens[row].tolist() == sample.encoder_tokens.tolist()
                assert batch.encoder_mask[row].tolist() == sample.encoder_mask.tolist()
                assert batch.tokens[row].tolist() == sample.decoder_tokens.tolist()
                assert batch.labels[row][batch.loss_mask[row]].tolist() == sample.labels[sample.loss_mask].tolist()
                # No index outside of the table, even where no loss counts.
                assert int(batch.labels[row].min()) >= 0
            assert batch.valid_tokens == int(batch.loss_mask.sum())


def test_sentinels_that_the_data_was_prepared_without_have_rows(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    prefix = write_sentences(tmp_path / "corpus", made_documents(60, 1), len(WORDS))
    named = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(tmp_path / "vocab.txt")}
    plain = load_tokenizer(config(**named).data)
    assert plain.vocab_size == len(WORDS)
    with IndexedDataset(prefix) as tokens:
        counts = tokens.document_count, len(tokens.sequence_lengths), tokens.token_count
    Manifest(plain.sha256, plain.vocab_size, None, *counts, len(WORDS) - 1, 1).write(prefix)
    found = config(train_data_path=[str(prefix)], vocab_extra_ids=50, **named)
    assert build_data(found, 0, 1).vocab_size == len(WORDS) + 50
    small = found.model_copy(update={"model": found.model.model_copy(update={"vocab_size": len(WORDS)})})
    with pytest.raises(
        DataError, match=f"{len(WORDS)} is too small for the tokenizer of the data; use {len(WORDS) + 50}"
    ):
        build_data(small, 0, 1)


def test_a_decoder_that_is_too_short_is_told_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    prefix = write_sentences(tmp_path / "corpus", made_documents(20, 1), len(VOCABULARY))
    named = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(tmp_path / "vocab.txt"), "mask_prob": 0.6}
    named["vocab_extra_ids"] = 50
    with pytest.raises(DataError, match=r"decoder_seq_length: 32 is too short"):
        build_data(config(train_data_path=[str(prefix)], **named), 0, 1)


@pytest.mark.parametrize(("encoder", "decoder"), [(64, 32), (6, 5), (40, 100)])
def test_mock_samples_hold_the_whole_walk(encoder: int, decoder: int) -> None:
    samples = MockT5Samples(200, (encoder, decoder), SEED, 1, mask_prob=0.15)
    first_word = samples._first_word
    for number in range(20):
        sample = samples.sample(number)
        spans: dict[int, list[int]] = {}
        for token in sample.decoder_tokens[sample.decoder_mask].tolist()[1:]:
            if FIRST_SENTINEL <= token < first_word:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert all(len(span) == SPAN for span in spans.values())
        text = [
            part for token in sample.encoder_tokens[sample.encoder_mask].tolist() for part in spans.get(token, [token])
        ]
        walk = MockDataset(200 - first_word, encoder, SEED, 1).sample(number) + first_word
        assert text == walk[: len(text)].tolist() and len(text) >= encoder // 2
        assert sample.labels[sample.loss_mask].tolist() == [
            *sample.decoder_tokens[sample.decoder_mask].tolist()[1:],
            END,
        ]


def test_mock_data_of_a_config() -> None:
    data = build_data(config(mock_data=True), 0, 1)
    one, again = data.micro_batches("train", 0)[0], data.micro_batches("train", 0)[0]
    assert one.tokens.shape == (2, DECODER) and one.encoder_tokens is not None
    assert one.encoder_tokens.shape == (2, ENCODER)
    assert torch.equal(one.encoder_tokens, again.encoder_tokens)
    assert not torch.equal(one.encoder_tokens, data.micro_batches("valid", 0)[0].encoder_tokens)
