"""Blends and fine-tuning data of a config, on any parallel layout, from any position."""

from __future__ import annotations

import math
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.data.token_files import write, write_sequences
from tests.trainer.data.training_data import by_number, config, same
from trainer.config.sections.batch_sizes import BatchSizes
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest
from trainer.data.loading import build
from trainer.data.loading.build import build_data, samples_of_run
from trainer.data.samples.batches import TrainData
from trainer.data.samples.gpt_dataset import GPTDataset
from trainer.data.samples.index_cache import EpochIndexCache
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.samples.sources import open_data, open_sources
from trainer.data.tokenizers.null import NullTokenizer

MODEL = {"vocab_size": 1000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Datasets with recognisable tokens.

    Of samples of 8 + 1 tokens a has 10, b 40, tiny 1 and nothing 0.
    """
    for name, first, tokens in (("a", 0, 81), ("b", 300, 321), ("tiny", 700, 9), ("nothing", 800, 8)):
        write(tmp_path / name, [[first + token] * 3 for token in range(tokens // 3)] + [[first] * (tokens % 3)])
    return tmp_path


def data_of(folder: Path, data: dict[str, Any], dp_rank: int = 0, dp: int = 1, **training: Any) -> TrainData:
    undivided = {} if "train_data_path" in data else {"split": "1"}
    filled = {
        key: value.format(f=folder) if isinstance(value, str) else value for key, value in {**undivided, **data}.items()
    }
    return build_data(config(filled, model=MODEL, **training), dp_rank, dp)


def rows(data: TrainData, split: Any = "train", batches: int = 5) -> list[list[int]]:
    found = [batch for step in range(batches) for batch in data.micro_batches(split, step * 8)]
    return [row for batch in found for row in batch.tokens.tolist()]


def test_weights_are_kept_and_each_dataset_has_its_own_order(folder: Path) -> None:
    blended = rows(data_of(folder, {"data_path": "0.25 {f}/a 0.75 {f}/b"}))
    parts = {name: rows(data_of(folder, {"data_path": f"{{f}}/{name}"})) for name in "ab"}
    of_a = [row for row in blended if row[0] < 300]
    of_b = [row for row in blended if row[0] >= 300]
    assert (of_a, of_b) == (parts["a"][:10], parts["b"][:30])
    assert all(sum(row[0] < 300 for row in blended[start : start + 8]) == 2 for start in range(0, 40, 8))


def test_without_weights_a_dataset_counts_by_its_size(folder: Path) -> None:
    blended = rows(data_of(folder, {"data_path": [f"{folder}/a", f"{folder}/b"]}))
    assert sum(row[0] < 300 for row in blended) == 8


def test_a_blend_continues_from_any_sample_on_any_layout_in_runs_of_any_length(folder: Path) -> None:
    asked = {"data_path": "1 {f}/a 2 {f}/b 0.1 {f}/tiny"}
    for consumed in (0, 8, 4000):
        serial = by_number([data_of(folder, asked)], consumed)
        replicas = by_number([data_of(folder, asked, rank, 2, train_iters=10_000) for rank in range(2)], consumed)
        assert all(same(replicas[index], serial[index]) for index in range(4))


def test_a_dataset_of_weight_0_is_not_opened(folder: Path) -> None:
    assert rows(data_of(folder, {"data_path": "0 {f}/none 1 {f}/b"})) == rows(data_of(folder, {"data_path": "{f}/b"}))


def test_a_dataset_too_small_for_its_share_is_repeated_and_reported_once(folder: Path) -> None:
    data = data_of(folder, {"data_path": "0.5 {f}/tiny 0.25 {f}/a 0.25 {f}/b"}, eval_iters=0)
    assert data.notes == (
        f"data.data_path: these datasets are repeated, because they are small for their weights: {folder}/tiny 35.6 "
        f"times, {folder}/a 2.0 times",
    )
    tiny = [row for row in rows(data) if 700 <= row[0] < 800]
    assert len(tiny) == 20
    assert 1 < len({tuple(row) for row in tiny}) <= 6  # three documents in another order each time
    assert data_of(folder, {"data_path": "{f}/tiny"}, eval_iters=0).notes == ()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"data_path": "1 {f}/nothing 9 {f}/b"}, r"train split of .*nothing has 8 tokens .* but one sample needs 9"),
        ({"data_path": "1 {f}/a 9 {f}/none"}, r"data.data_path: .*none\.bin"),
        ({"data_path": "1 {f}/a 1 {f}/b", "split": "60,40"}, None),
        ({"data_path": "1 {f}/tiny 1 {f}/b", "split": "99,1"}, "data.data_path: the valid split of .*tiny has 0"),
        ({"train_data_path": "{f}/a", "valid_data_path": "1 {f}/nothing 1 {f}/b"}, "data.valid_data_path: the valid"),
    ],
)
def test_a_dataset_without_a_sample_is_refused_if_the_config_needs_it(
    folder: Path, data: dict[str, Any], says: str | None
) -> None:
    if says is None:
        assert data_of(folder, data).has("valid")
        return
    with pytest.raises(DataError, match=says) as caught:
        data_of(folder, data)
    assert "\n" not in str(caught.value)


def test_by_default_a_dataset_without_validation_samples_is_left_out_of_validation(folder: Path) -> None:
    write(folder / "c", [[500 + token] * 9 for token in range(400)])
    data = data_of(folder, {"data_path": "1 {f}/a 1 {f}/tiny 2 {f}/c", "split": "969,30,1"})
    assert data.has("valid")
    assert {row[0] // 100 for row in rows(data, "valid", 1)} == {8}
    (left_out,) = (note for note in data.notes if "skips a dataset" in note)
    assert left_out.endswith("but one sample needs 9; the same holds for 1 more")


def test_data_of_two_tokenizers_is_not_mixed(folder: Path) -> None:
    describe(folder / "a", 0, "1" * 64)
    describe(folder / "b", 0, "2" * 64)
    with pytest.raises(DataError, match=r"another tokenizer \(sha256 222222222222\) than .*/a \(111111111111\)"):
        data_of(folder, {"data_path": "1 {f}/a 1 {f}/b"})
    with pytest.raises(DataError, match="another tokenizer"):
        data_of(folder, {"train_data_path": "{f}/a", "valid_data_path": "{f}/b"})


def describe(prefix: Path, eod: int | None, sha: str = "1" * 64) -> None:
    with IndexedDataset(prefix) as tokens:
        counts = (tokens.document_count, len(tokens), tokens.token_count)
    Manifest(sha, 1000, eod, *counts, largest_token=999, text_bytes=1).write(prefix)


def test_documents_that_end_differently_are_refused_if_their_ends_matter(folder: Path) -> None:
    describe(folder / "a", 5)
    describe(folder / "b", 6)
    asked = {"data_path": "1 {f}/a 1 {f}/b"}
    data_of(folder, asked)
    with pytest.raises(DataError, match="documents of .*/a end with token 5, but those of .*/b with 6; prepare"):
        data_of(folder, {**asked, "reset_attention_mask": True})
    describe(folder / "b", 5)
    assert data_of(folder, {**asked, "reset_attention_mask": True}).has_documents
    (folder / "b.json").unlink()
    with pytest.raises(DataError, match="eod_mask_loss: .*/b has no manifest .* unlike others of the blend"):
        data_of(folder, {**asked, "eod_mask_loss": True})
    # Tokens below 1000; 1000 ends a document.
    named = {"tokenizer_type": "NullTokenizer"}
    sha = NullTokenizer(1000).sha256
    describe(folder / "a", 1000, sha)
    assert data_of(folder, {**asked, **named, "eod_mask_loss": True}).masks_loss
    describe(folder / "a", 7, sha)
    with pytest.raises(DataError, match="/a: documents end with token 7, but NullTokenizer.* ends them with 1000"):
        data_of(folder, {**asked, **named})


def test_each_split_may_be_a_blend_of_its_own(folder: Path) -> None:
    paths = {"train_data_path": "{f}/b", "valid_data_path": "1 {f}/a 3 {f}/b", "test_data_path": "{f}/a"}
    data = data_of(folder, paths)
    assert {row[0] // 300 for row in rows(data)} == {1}
    assert sum(row[0] < 300 for row in rows(data, "valid", 1)) == 2
    assert {row[0] // 300 for row in rows(data, "test", 1)} == {0}


def test_callers_that_take_one_dataset_per_split_refuse_a_blend(folder: Path) -> None:
    asked = config({"data_path": f"1 {folder}/a 1 {folder}/b"}, model=MODEL)
    assert [len(sources) for sources in open_data(asked).blends.values()] == [2, 2, 2]
    with pytest.raises(DataError, match="data.data_path: is a blend of 2 datasets, .* such as .*/a"):
        open_sources(asked)


def test_megatrons_order_is_that_of_the_run_and_of_the_shares(folder: Path) -> None:
    order = {"sample_order": "megatron", "split": "1"}
    training = {"train_iters": 15, "seed": 5}  # 120 samples
    with IndexedDataset(folder / "b") as tokens:

        def first(size: int, count: int) -> list[list[int]]:
            dataset = GPTDataset(tokens, range(len(tokens)), 8, 5, num_samples=size)
            return [dataset.sample(number)[:-1].tolist() for number in range(count)]

        assert rows(data_of(folder, {"data_path": "{f}/b", **order}, **training)) == first(120, 40)
        blended = rows(data_of(folder, {"data_path": "1 {f}/a 2 {f}/b", **order}, **training))
        of_b = [row for row in blended if row[0] >= 300]
        assert of_b == first(math.ceil(80 * 1.005), len(of_b)) != first(80 * 3, len(of_b))
        # A single dataset with a weight is a blend, with the surplus of blends: 121 samples need four epochs.
        alone = rows(data_of(folder, {"data_path": "1 {f}/b", **order}, **training))
        assert alone == first(121, 40)
        own = {"train_data_path": "1 {f}/b", "sample_order": "megatron"}
        assert rows(data_of(folder, own, **training)) == first(120, 40)


@pytest.mark.parametrize("iterations", [10**10, 10**12])
def test_an_order_larger_than_memory_is_refused_before_it_is_built(folder: Path, iterations: int) -> None:
    asked = {"data_path": "{f}/tiny", "split": "1"}
    says = r"sample_order: .* [0-9]{10,} epochs .*/tiny, which needs [0-9,]{3,} GiB .* set data.sample_order to stable"
    with pytest.raises(DataError, match=says):
        data_of(folder, {**asked, "sample_order": "megatron"}, train_iters=iterations)
    data_of(folder, asked, train_iters=iterations)


def test_a_cached_order_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpochIndexCache, "__init__", partialmethod(EpochIndexCache.__init__, smallest=1))
    asked = {"data_path": "{f}/a", "sample_order": "megatron"}
    data = data_of(folder, asked, train_iters=50)
    monkeypatch.setattr(build, "memory_limit", lambda: 1)
    with pytest.raises(DataError, match="the limit of this process is 0 GiB; set data.sample_order to stable"):
        data_of(folder, asked, train_iters=50)
    made = rows(data)
    assert rows(data_of(folder, asked, train_iters=50, eval_iters=0)) == made


def test_samples_of_a_run_are_counted_as_megatron_counts() -> None:
    asked = config({"mock_data": True}, train_iters=25, eval_interval=10, eval_iters=4)
    assert [samples_of_run(asked.training, split, BatchSizes(8)) for split in ("train", "valid", "test")] == [
        25 * 8,
        3 * 4 * 8,
        4 * 8,
    ]
    growing = BatchSizes(8, (4, 4, 20))
    assert [samples_of_run(asked.training, split, growing) for split in ("train", "valid")] == [
        5 * 4 + 20 * 8,
        3 * 4 * 8,
    ]


def check_packed(batch: MicroBatch) -> None:
    assert batch.documents is not None and batch.positions is not None and batch.loss_mask is not None
    for row, bounds in enumerate(batch.documents.bounds):
        expected = [place for start, stop in zip(bounds, bounds[1:], strict=False) for place in range(stop - start)]
        assert batch.positions[row].tolist() == expected
        assert bounds[-1] == batch.tokens.shape[1] == 8


def test_whole_documents_reach_the_model_with_bounds_positions_and_mask(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    documents = [[[1, 2], list(range(100, 100 + size))] for size in random.randint(1, 9, 60)]
    write_sequences(tmp_path / "d", documents)
    asked = {"data_path": "{f}/d", "sample_packing": True, "answer_only_loss": True, "reset_position_ids": True}
    data = data_of(tmp_path, asked, eval_iters=0)
    assert data.masks_loss
    too_long = sum(len(answer) > 7 for _, answer in documents)
    assert data.notes == (
        f"data.data_path: {too_long} of the 60 documents in the train split are longer than training.seq_length + 1 "
        "and are skipped",
    )
    serial = by_number([data], 16)
    for batch in serial.values():
        check_packed(batch)
        assert batch.loss_mask is not None
        assert torch.equal(batch.loss_mask > 0, batch.labels >= 100)
    replicas = by_number([data_of(tmp_path, asked, rank, 2) for rank in range(2)], 16)
    assert all(same(replicas[index], serial[index]) for index in serial)


def test_splits_of_whole_documents_are_cut_between_documents(tmp_path: Path) -> None:
    write_sequences(tmp_path / "d", [[[10 * number + 1], [10 * number + 2]] for number in range(10)])
    asked = {"data_path": "{f}/d", "sample_packing": True, "split": "50,50"}
    data = data_of(tmp_path, asked)
    for split, wanted in (("train", range(5)), ("valid", range(5, 10))):
        batch = data.micro_batches(split, 0)[0]  # type: ignore[arg-type]
        assert {int(token) // 10 for token in batch.tokens[batch.loss_mask > 0]} == set(wanted)
    blended = data_of(tmp_path, asked | {"data_path": "1 {f}/d 1 {f}/d"})
    assert torch.equal(blended.micro_batches("valid", 0)[0].tokens[0], data.micro_batches("valid", 0)[0].tokens[0])


def test_documents_that_all_are_too_long_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [list(range(20))] * 5)
    with pytest.raises(DataError, match="one sample needs a document of 2 to 9; lower training.seq_length"):
        data_of(tmp_path, {"data_path": "{f}/d", "sample_packing": True})
