"""BERT's batches of a config: those of BertDataset, on any parallel layout. A second on one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data.masked.masked_corpus import VOCABULARY, made_documents, write_sentences
from tests.trainer.data.training_data import config
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.loading.build import build_data
from trainer.data.masked.bert_dataset import BertDataset
from trainer.data.masked.masking import MaskingRules
from trainer.data.samples.batches import TrainData
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import settings_of

LENGTH = 48
FIELDS = ("tokens", "labels", "loss_mask", "padding_mask", "token_types", "sample_labels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentences")
    (path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    for seed, name in enumerate("ab"):
        write_sentences(path / name, made_documents(30, seed), len(VOCABULARY))
    return path


def settings(folder: Path, data: dict[str, Any], **model: Any) -> Any:
    named = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(folder / "vocab.txt"), "split": "90,10,0", **data}
    return config(named, model={"architecture": "bert", **model}, seq_length=LENGTH, eval_iters=1)


def steps(data: TrainData, split: Any = "train", count: int = 3) -> list[MicroBatch]:
    return [batch for step in range(count) for batch in data.micro_batches(split, step * 8)]


def same(one: MicroBatch, other: MicroBatch) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in FIELDS]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def test_batches_are_the_samples_of_the_dataset(folder: Path) -> None:
    asked = settings(folder, {"data_path": [str(folder / "a")], "mask_prob": 0.3})
    data = build_data(asked, 0, 1)
    assert data.masks_loss and data.has_documents and data.vocab_size == len(VOCABULARY)
    tokenizer = open_tokenizer(settings_of(asked.data))
    with IndexedDataset(folder / "a") as tokens:
        documents = {"train": range(27), "valid": range(27, 30)}
        for split, part in documents.items():
            dataset = BertDataset(tokens, part, LENGTH, asked.training.seed, tokenizer, MaskingRules(0.3))
            for number, batch in enumerate(steps(data, split)):
                for row in range(2):
                    sample = dataset.sample(2 * number + row)
                    assert batch.tokens[row].tolist() == sample.tokens.tolist()
                    assert batch.token_types is not None and batch.token_types[row].tolist() == sample.types.tolist()
                    assert batch.padding_mask is not None and batch.loss_mask is not None
                    assert batch.padding_mask[row].tolist() == sample.padding_mask.tolist()
                    assert batch.labels[row][batch.loss_mask[row]].tolist() == sample.labels[sample.loss_mask].tolist()
                    assert batch.sample_labels is not None and batch.sample_labels[row] == sample.is_random
                assert batch.labels.min() >= 0
                assert batch.loss_counts == {"lm_loss": int(batch.loss_mask.sum()), "sop_loss": 2}


@pytest.mark.parametrize("data", [{"data_path": ["a"]}, {"data_path": ["0.3", "a", "0.7", "b"]}, {"mock_data": True}])
def test_replicas_share_the_batches_of_one(folder: Path, data: dict[str, Any]) -> None:
    paths = [str(folder / part) if part in ("a", "b") else part for part in data.get("data_path", [])]
    asked = settings(folder, {**data, **({"data_path": paths} if paths else {})})
    alone = {
        (step, batch.index): batch
        for step in range(3)
        for batch in build_data(asked, 0, 1).micro_batches("train", step * 8)
    }
    parts = [build_data(asked, rank, 2) for rank in range(2)]
    shared = {
        (step, batch.index): batch
        for part in parts
        for step in range(3)
        for batch in part.micro_batches("train", step * 8)
    }
    assert alone.keys() == shared.keys() and len(alone) == 12
    assert all(same(alone[key], shared[key]) for key in alone)


def test_without_a_binary_head_samples_have_one_part_and_no_label(folder: Path) -> None:
    for data in ({"data_path": [str(folder / "a")]}, {"mock_data": True}):
        for batch in steps(build_data(settings(folder, data, bert_binary_head=False), 0, 1)):
            assert batch.sample_labels is None and batch.loss_counts.keys() == {"lm_loss"}
            assert batch.token_types is not None and not batch.token_types.any()


def test_mock_samples_hide_words_only(folder: Path) -> None:
    batches = steps(build_data(settings(folder, {"mock_data": True}, vocab_size=40), 0, 1), count=20)
    hidden = total = 0
    for batch in batches:
        assert batch.loss_mask is not None and batch.padding_mask is not None and batch.token_types is not None
        assert (batch.tokens[~batch.padding_mask] == 0).all() and (batch.tokens < 40).all()
        assert (batch.labels[batch.loss_mask] >= 4).all() and batch.loss_mask.any(1).all()
        assert (
            not (batch.loss_mask & ~batch.padding_mask).any()
            and not (batch.token_types.bool() & ~batch.padding_mask).any()
        )
        hidden, total = hidden + int(batch.loss_mask.sum()), total + int(batch.padding_mask.sum())
    assert 0.1 < hidden / total < 0.18
    swapped = torch.cat([batch.sample_labels for batch in batches if batch.sample_labels is not None])
    assert 0.3 < swapped.float().mean() < 0.7


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"vocab_file": None}, "data.tokenizer_model: is unset, but masking needs the tokenizer"),
        ({"data_path": ["a", "b"], "sample_order": "megatron"}, "set data.sample_order to stable"),
        ({"split": "1,99,0"}, "none of its 0 documents is usable"),
    ],
)
def test_bad_data_is_told(folder: Path, data: dict[str, Any], says: str) -> None:
    named = {"data_path": ["a"], **data}
    if data.get("vocab_file", "") is None:
        named["tokenizer_type"] = None
    named["data_path"] = [str(folder / part) for part in named["data_path"]]
    with pytest.raises(DataError, match=says):
        build_data(settings(folder, named), 0, 1)
