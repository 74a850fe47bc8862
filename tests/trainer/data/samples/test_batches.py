"""Micro-batches: the same global batch on every layout, and refusals before the first step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.data.token_files import write
from tests.trainer.data.training_data import by_number, config, same
from trainer.config.formats.indexed_data import DTYPES
from trainer.config.sections.checkpoint import CheckpointConfig
from trainer.data.commands.preprocess import tokenize_documents
from trainer.data.errors import DataError
from trainer.data.indexed.manifest import Manifest
from trainer.data.indexed.writer import IndexedDatasetWriter
from trainer.data.loading.build import build_data
from trainer.data.samples.batches import Packing
from trainer.data.samples.document_places import DocumentEnds, Documents
from trainer.data.samples.index_cache import EpochIndexCache
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.samples.mock import MockDataset
from trainer.data.tokenizers.null import NullTokenizer
from trainer.data.tokenizers.tokenizer import Tokenizer


def prepared(folder: Path, tokenizer: Tokenizer) -> str:
    texts = [f"return {number} * self.value\n" * (1 + number % 5) for number in range(60)]
    tokenize_documents(texts, tokenizer, folder / "d")
    return str(folder / "d")


@pytest.mark.parametrize("mock", [True, False])
def test_the_global_batch_is_the_same_for_every_dp(tmp_path: Path, tokenizer: Tokenizer, mock: bool) -> None:
    source: dict[str, Any] = (
        {"mock_data": True} if mock else {"data_path": prepared(tmp_path, tokenizer), "eod_mask_loss": True}
    )
    serial = by_number([build_data(config(source), 0, 1)], consumed=72)
    assert sorted(serial) == [0, 1, 2, 3]
    for dp in (2, 4):
        replicas = [build_data(config(source), rank, dp) for rank in range(dp)]
        assert [batch.index for batch in replicas[1].micro_batches("train", 72)] == list(range(1, 4, dp))
        split = by_number(replicas, consumed=72)
        assert all(same(split[index], serial[index]) for index in serial)


def test_shapes_labels_and_place(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = build_data(config({"data_path": prepared(tmp_path, tokenizer)}), 0, 1)
    batch, *_ = data.micro_batches("train", 0)
    assert batch.tokens.shape == batch.labels.shape == (2, 8)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.loss_mask is None
    assert sum(batch.valid_tokens for batch in data.micro_batches("train", 0)) == 64
    assert not data.masks_loss
    later = data.micro_batches("train", 6)[0]
    assert torch.equal(data.micro_batches("train", 0)[3].tokens, later.tokens)
    assert data.vocab_size == 300


def test_masked_tokens_are_not_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = {"data_path": prepared(tmp_path, tokenizer), "eod_mask_loss": True}
    replicas = [build_data(config(source), rank, 2) for rank in range(2)]
    counted = 0
    for data in replicas:
        assert data.masks_loss
        for batch in data.micro_batches("train", 8):
            assert batch.loss_mask is not None
            assert torch.equal(batch.loss_mask == 0, batch.tokens == tokenizer.eod)
            assert batch.valid_tokens == batch.loss_mask.sum().item()
            counted += batch.valid_tokens
    whole = build_data(config(source), 0, 1)
    assert sum(batch.valid_tokens for batch in whole.micro_batches("train", 8)) == counted < 64


def by_loop(tokens: list[int], eod: int) -> tuple[list[int], list[int]]:
    """Bounds and positions of one sample, by a plain loop over tokens."""
    bounds, positions = [0], []
    for place, token in enumerate(tokens):
        positions.append(place - bounds[-1])
        if token == eod and place + 1 < len(tokens):
            bounds.append(place + 1)
    return [*bounds, len(tokens)], positions


def test_documents_are_found_where_they_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = {"data_path": prepared(tmp_path, tokenizer), "reset_attention_mask": True, "reset_position_ids": True}
    data = build_data(config(source, seq_length=40), 0, 1)
    counts = set()
    for batch in data.micro_batches("train", 16):
        assert batch.loss_mask is None
        assert batch.documents is not None
        assert batch.positions is not None
        assert batch.to(torch.device("meta")).positions.device.type == "meta"
        for row, bounds, positions in zip(batch.tokens.tolist(), batch.documents.bounds, batch.positions, strict=True):
            assert (list(bounds), positions.tolist()) == by_loop(row, tokenizer.eod)
            counts.add(len(bounds))
    assert len(counts) > 1
    assert not data.masks_loss


@pytest.mark.parametrize("share", [0.02, 0.7])
def test_few_and_very_many_documents_are_found_alike(share: float) -> None:
    tokens = np.where(np.random.RandomState(3).rand(4, 50) < share, 9, 1)
    tokens[1] = 1
    tokens[2, -1] = tokens[3, 0] = 9
    batch = Packing(9, separate_attention=True, restart_positions=True).apply(
        MicroBatch(torch.from_numpy(tokens), torch.from_numpy(tokens))
    )
    assert batch.documents is not None and batch.positions is not None
    found = [(list(own), row.tolist()) for own, row in zip(batch.documents.bounds, batch.positions, strict=True)]
    assert found == [by_loop(row, 9) for row in tokens.tolist()]


def test_ends_at_the_borders_of_a_sample() -> None:
    tokens = torch.tensor([[9, 9, 1, 2, 9], [1, 2, 3, 4, 5]])
    batch = Packing(9, separate_attention=True, restart_positions=True).apply(MicroBatch(tokens, tokens))
    assert batch.documents is not None
    assert batch.documents.bounds == ((0, 1, 2, 5), (0, 5))
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_micro_batches_have_the_documents_of_their_own_samples() -> None:
    bounds = ((0, 2, 5), (0, 5), (0, 1, 4, 5), (0, 3, 5), (0, 5), (0, 4, 5))
    ends = DocumentEnds(np.isin(np.arange(30).reshape(6, 5), [1, 10, 13, 14, 17, 28]))
    assert ends.cu_seqlens.tolist() == [0, 2, 5, 10, 11, 14, 15, 18, 20, 25, 29, 30]
    assert DocumentEnds.between(bounds).cu_seqlens.tolist() == ends.cu_seqlens.tolist()
    cpu = torch.device("cpu")
    (whole,) = ends.documents(6)
    assert whole == Documents(bounds)
    assert whole != Documents(bounds[:5]) and whole != Documents([(0, 30)]) and whole != bounds
    for size in (1, 2, 3):
        parts = ends.documents(size)
        assert [part.bounds for part in parts] == [bounds[first : first + size] for first in range(0, 6, size)]
        assert all(torch.equal(part.positions(cpu), Documents(part.bounds).positions(cpu)) for part in parts)
        assert torch.equal(torch.cat([part.positions(cpu) for part in parts]), whole.positions(cpu))
    assert whole.positions(cpu)[2].tolist() == [0, 0, 1, 2, 0]


def test_positions_are_computed_once_and_only_if_needed() -> None:
    tokens = torch.tensor([[9, 1, 2, 9, 4]])
    batch = Packing(9, separate_attention=True, restart_positions=True).apply(MicroBatch(tokens, tokens))
    assert batch.documents is batch.restarts is not None
    assert batch.positions is batch.to(torch.device("cpu")).positions
    assert Packing(9, separate_attention=True).apply(MicroBatch(tokens, tokens)).positions is None


def test_an_existing_loss_mask_is_kept() -> None:
    tokens, mask = torch.tensor([[9, 1, 9, 2]]), torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    batch = Packing(9, mask_loss=True).apply(MicroBatch(tokens, tokens, mask))
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [[0, 0, 0, 1]]


def test_each_rule_for_documents_is_on_its_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = prepared(tmp_path, tokenizer)
    for key, field in (
        ("eod_mask_loss", "loss_mask"),
        ("reset_attention_mask", "documents"),
        ("reset_position_ids", "positions"),
    ):
        batch = build_data(config({"data_path": path, key: True}), 0, 1).micro_batches("train", 0)[0]
        filled = {name for name in ("loss_mask", "documents", "positions") if getattr(batch, name) is not None}
        assert filled == {field}


def test_order_does_not_depend_on_the_length_of_the_run(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = prepared(tmp_path, tokenizer)
    short, long = (build_data(config({"data_path": path}, train_iters=n), 0, 1) for n in (10, 100_000))
    for consumed in (0, 80, 8_000):
        assert same(short.micro_batches("train", consumed)[0], long.micro_batches("train", consumed)[0])


def test_splits_and_separate_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = prepared(tmp_path, tokenizer)
    data = build_data(config({"data_path": path, "split": "80,20,0"}), 0, 1)
    assert (data.has("train"), data.has("valid"), data.has("test")) == (True, True, False)
    two = build_data(config({"train_data_path": path, "valid_data_path": path}), 0, 1)
    assert two.has("valid")
    one = build_data(config({"train_data_path": path}), 0, 1)
    assert one.notes == ("no evaluation during training: there is no valid split",)


def test_an_empty_valid_split_is_reported_by_default_and_refused_if_requested(tmp_path: Path) -> None:
    write(tmp_path / "d", [list(range(50))] * 20 + [[1]], 300)
    model = {"vocab_size": 300}
    data = build_data(config({"data_path": str(tmp_path / "d")}, model=model), 0, 1)
    assert not data.has("valid")
    assert "the valid split" in data.notes[0]
    assert "1 tokens in 1 documents, but one sample needs 9" in data.notes[0]
    asked = {"data_path": str(tmp_path / "d"), "split": "95,5,0"}
    with pytest.raises(DataError, match="the valid split .* needs 9; raise its share in data.split"):
        build_data(config(asked, model=model), 0, 1)
    assert not build_data(config(asked, model=model, eval_iters=0), 0, 1).notes


@pytest.mark.parametrize(
    ("data", "model", "says"),
    [
        ({}, {}, "data.data_path: is unset; name the prefix"),
        ({"data_path": "{folder}/none"}, {}, r"data.data_path: .*none\.bin and .*none\.idx: no such file"),
        ({"data_path": "."}, {}, r"data.data_path: \.\.bin and \.\.idx: no such file"),
        ({"data_path": "/"}, {}, r"data.data_path: /\.bin and /\.idx: no such file"),
        ({"data_path": "{folder}/plain"}, {}, "model.vocab_size: is unset, and the data has no manifest"),
        ({"data_path": "{folder}/short"}, {"vocab_size": 300}, "has 5 tokens in 1 documents, but one sample needs 9"),
        ({"data_path": "{folder}/d"}, {"vocab_size": 200}, "model.vocab_size: 200 is too small for .*use 300"),
        (
            {"data_path": "{folder}/plain", "tokenizer_model": "{folder}/other.json"},
            {"vocab_size": 250},
            "model.vocab_size: 250 is too small for the tokenizer of the data; use 300",
        ),
        ({"data_path": "{folder}/d", "tokenizer_model": "{folder}/other.json"}, {}, "another tokenizer"),
        (
            {"data_path": "{folder}/plain", "eod_mask_loss": True},
            {"vocab_size": 300},
            "data.eod_mask_loss: the end-of-document token is unknown",
        ),
        (
            {"data_path": "{folder}/plain", "reset_position_ids": True},
            {"vocab_size": 300},
            "data.reset_position_ids: the end-of-document token is unknown; set data.tokenizer_model",
        ),
        (
            {"mock_data": True, "reset_attention_mask": True},
            {},
            "data.reset_attention_mask: mock data has no documents",
        ),
    ],
)
def test_unusable_data_is_refused(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer, data: dict[str, Any], model: Any, says: str
) -> None:
    prepared(tmp_path, tokenizer)
    write(tmp_path / "plain", [list(range(250))] * 4, 300)
    write(tmp_path / "short", [[1, 2, 3, 4, 5]], 300)
    other = json.loads(tokenizer_file.read_text()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    filled = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in data.items()}
    with pytest.raises(DataError, match=says) as caught:
        build_data(config(filled, model=model), 0, 1)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit_the_loaded_tables_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [list(range(250))] * 4, 300)
    manifest = Manifest("0" * 64, 300, 0, 4, 4, 1000, 249, 1000)
    manifest.write(tmp_path / "d")
    chosen = config({"data_path": str(tmp_path / "d")}, model={"vocab_size": 200})
    chosen = chosen.model_copy(update={"checkpoint": CheckpointConfig(load="/models/start")})
    with pytest.raises(DataError, match="the tables of /models/start have 200 rows; the tokenizer of the data has 300"):
        build_data(chosen, 0, 1)


def test_tokens_outside_the_vocabulary_are_found_without_a_manifest(tmp_path: Path) -> None:
    write(tmp_path / "d", [list(range(250))] * 4, 300)
    data = build_data(config({"data_path": str(tmp_path / "d"), "split": "1"}, model={"vocab_size": 8}), 0, 1)
    with pytest.raises(DataError, match="has token .*, but model.vocab_size is 8"):
        data.micro_batches("train", 0)


def store(prefix: Path, documents: list[list[int]], code: int) -> None:
    """Write an indexed dataset of any integer dtype."""
    with IndexedDatasetWriter(prefix, code) as writer:
        lengths = np.array([len(document) for document in documents])
        writer.append(np.concatenate(documents), lengths, np.arange(1, len(documents) + 1))
        writer.finish()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("code", DTYPES)
def test_tokens_are_the_same_however_they_are_stored(tmp_path: Path, code: int, packs: bool) -> None:
    texts = [[(7 * number + place) % 120 for place in range(5 + number)] for number in range(12)]
    store(tmp_path / "a", texts, code)
    store(tmp_path / "b", texts, 8)
    apart = {"sample_packing": True} if packs else {"reset_position_ids": True, "eod_mask_loss": True}
    rules = {"split": "1", "tokenizer_type": "NullTokenizer", **apart}
    wide = {"data_path": f"1 {tmp_path}/a 1 {tmp_path}/b"}
    narrow = {"data_path": f"1 {tmp_path}/b 1 {tmp_path}/b"}
    found, expected = (
        build_data(config({**data, **rules}, model={"vocab_size": 119}, eval_iters=0), 0, 1).micro_batches("train", 8)
        for data in (wide, narrow)
    )
    assert all(map(same, found, expected))
    assert all(torch.equal(one.positions, other.positions) for one, other in zip(found, expected, strict=True))
    assert found[0].tokens.dtype == found[0].labels.dtype == torch.int64


@pytest.mark.parametrize(("code", "wrong"), [(2, -1), (3, -7), (4, -1), (4, 2**31 - 1), (5, 2**32 + 1), (5, -(2**63))])
def test_no_number_is_mistaken_for_a_token_of_the_vocabulary(tmp_path: Path, code: int, wrong: int) -> None:
    store(tmp_path / "d", [[1, 2, 3, wrong, 4]] * 40, code)
    data = build_data(config({"data_path": str(tmp_path / "d"), "split": "1"}, model={"vocab_size": 100_000}), 0, 1)
    with pytest.raises(DataError, match=f"a sample from 0 on has token {wrong}, but model.vocab_size is 100000"):
        data.micro_batches("train", 0)


def test_training_on_numbers_with_their_end_of_document(tmp_path: Path) -> None:
    tokenize_documents(["1 2 3 4 9"] * 20, NullTokenizer(10), tmp_path / "n")
    numbers = {"data_path": str(tmp_path / "n"), "tokenizer_type": "NullTokenizer", "eod_mask_loss": True}
    data = build_data(config(numbers, model={"vocab_size": 10}), 0, 1)
    assert data.vocab_size == 11
    batches = data.micro_batches("train", 0)
    tokens = torch.cat([batch.tokens for batch in batches])
    assert tokens.max() == 10
    assert sum(batch.valid_tokens for batch in batches) == int((tokens != 10).sum())
    with pytest.raises(DataError, match="another tokenizer"):
        build_data(config(numbers, model={"vocab_size": 11}), 0, 1)


def test_data_without_ends_of_documents_has_to_be_prepared_again(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer
) -> None:
    tokenize_documents(["some text"] * 40, tokenizer, tmp_path / "d", append_eod=False)
    asked = {"data_path": str(tmp_path / "d"), "tokenizer_model": str(tokenizer_file), "reset_attention_mask": True}
    with pytest.raises(DataError) as caught:
        build_data(config(asked), 0, 1)
    prefix = tmp_path / "d"
    expected = f"data.reset_attention_mask: {prefix} was prepared without --append-eod; prepare it again with the flag"
    assert str(caught.value) == expected


def test_manifest_of_another_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [list(range(250))] * 4, 300)
    Manifest("0" * 64, 300, 0, 4, 4, 1000, 249, 1000, schema=3).write(tmp_path / "d")
    with pytest.raises(DataError, match=r"d\.json: is not a manifest of schema 1 or 2"):
        build_data(config({"data_path": str(tmp_path / "d")}), 0, 1)


def test_caches_are_in_the_configured_folder(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.loading.build.EpochIndexCache", partial(EpochIndexCache, smallest=0))
    path = prepared(tmp_path, tokenizer)
    build_data(config({"data_path": path, "data_cache_path": str(tmp_path / "x")}), 0, 1).micro_batches("train", 0)
    assert len(list((tmp_path / "x").iterdir())) == 1
    build_data(config({"data_path": path}), 0, 1).micro_batches("train", 0)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_mock_data_is_a_learnable_random_walk() -> None:
    data = MockDataset(50_000, 4096, seed=1, split=0)
    sample = data.sample(10**9)
    assert len(sample) == 4097
    assert sample.dtype == np.int64
    steps = np.diff(sample) % 1024
    found, counts = np.unique(steps, return_counts=True)
    shares = counts / counts.sum()
    assert set(found) == {1, 2, 3, 5, 8, 13}
    assert abs(-(shares * np.log(shares)).sum() - data.entropy) < 0.05
    others = (
        MockDataset(50_000, 4096, 2, 0).sample(10**9),
        MockDataset(50_000, 4096, 1, 1).sample(10**9),
        data.sample(0),
    )
    assert not any(np.array_equal(sample, other) for other in others)
    assert np.array_equal(sample, MockDataset(50_000, 4096, 1, 0).sample(10**9))
    assert MockDataset(3, 16, 1, 0).sample(0).max() < 3
