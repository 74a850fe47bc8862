"""Resuming with changed data: every sample once and in order, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data.token_files import write
from tests.trainer.data.training_data import config
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest
from trainer.data.loading.build import build_data
from trainer.data.samples import blend
from trainer.data.samples.batches import TrainData
from trainer.data.samples.continuation import ContinuedDatasets, DatasetRecord
from trainer.distributed.mesh import ParallelMesh
from trainer.process.progress import TrainingProgress
from trainer.training.pretraining import _build_loader

State = dict[str, Any]
FIRST = {"a": 0, "b": 300, "c": 600}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Datasets of 20 documents of 8 tokens, with different tokens in each dataset."""
    for name, first in FIRST.items():
        write(tmp_path / name, [[first + 8 * number + place for place in range(8)] for number in range(20)])
    return tmp_path


def data_of(folder: Path, path: str, data: State | None = None, **training: Any) -> TrainData:
    words = [word if word[0].isdigit() else f"{folder}/{word}" for word in path.split()]
    asked = {"data_path": words, "split": "1", **(data or {})}
    return build_data(config(asked, model={"vocab_size": 1000}, eval_iters=0, **training), 0, 1)


def gone_on(data: TrainData, state: State | None, consumed: int) -> TrainData:
    data.restore(json.loads(json.dumps(state)), consumed)
    return data


def rows(data: TrainData, start: int, stop: int) -> list[list[int]]:
    batches = [batch for consumed in range(start, stop, 8) for batch in data.micro_batches("train", consumed)]
    return [row for batch in batches for row in batch.tokens.tolist()]


def of(name: str, found: list[list[int]]) -> list[list[int]]:
    return [row for row in found if FIRST[name] <= row[0] < FIRST[name] + 300]


@pytest.mark.parametrize("path", ["a", "0.3 a 0.7 b", "a b"])
def test_unchanged_data_continues_without_a_message(folder: Path, path: str) -> None:
    whole = data_of(folder, path)
    fresh = data_of(folder, path, train_iters=50)
    said = fresh.notes
    again = gone_on(fresh, whole.state(80), 80)
    assert again.notes == said
    assert again.state(80) == whole.state(80)
    assert rows(again, 80, 160) == rows(whole, 80, 160)


@pytest.mark.parametrize("block", [blend.BLOCK, 16])
def test_changes_of_the_blend_repeat_and_skip_no_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(blend, "BLOCK", block)
    state: State | None = None
    found: list[list[list[int]]] = []
    notes: list[str] = []
    phases = ("a", "0.5 a 0.5 b", "0.25 b 0.75 a", "b c", "0.9 c 0.1 a")
    for number, path in enumerate(phases):
        data = gone_on(data_of(folder, path), state, 40 * number)
        found.append(rows(data, 40 * number, 40 * (number + 1)))
        state, notes = (
            data.state(40 * (number + 1)),
            [*notes, *(note for note in data.notes if note.startswith("data: "))],
        )
    served = [row for part in found for row in part]
    for name in "abc":
        own = of(name, served)
        assert own == rows(data_of(folder, name), 0, 200)[: len(own)]
    shares = [[len(of(name, part)) for name in "abc"] for part in found]
    assert shares == [[40, 0, 0], [20, 20, 0], [30, 10, 0], [0, 20, 20], [4, 0, 36]]
    continues = "former datasets continue at their position"
    assert notes == [
        f"data: the blend changes at sample 40 (now {folder}/a 0.5 (was 1) of the samples; new: {folder}/b); "
        + continues,
        f"data: the blend changes at sample 80 (now {folder}/b 0.25 (was 0.5), {folder}/a 0.75 (was 0.5) of the "
        f"samples); {continues}",
        f"data: the blend changes at sample 120 (now {folder}/b 0.5 (was 0.25) of the samples; new: {folder}/c; "
        f"left out: {folder}/a); {continues}",
        f"data: the blend changes at sample 160 (now {folder}/c 0.9 (was 0.5), {folder}/a 0.1 (was 0) of the "
        f"samples; left out: {folder}/b); {continues}",
    ]


def test_moved_data_continues_and_other_data_starts_from_the_beginning(folder: Path) -> None:
    state = data_of(folder, "a").state(40)
    write(folder / "moved/a", [list(document) for document in _documents(folder / "a")])
    moved = gone_on(data_of(folder, "moved/a"), state, 40)
    assert moved.notes == ()
    assert rows(moved, 40, 48) == rows(data_of(folder, "a"), 40, 48)
    other = gone_on(data_of(folder, "b", seq_length=4), state, 40)
    assert rows(other, 40, 48) == rows(data_of(folder, "b", seq_length=4), 0, 8)
    assert other.notes == (
        f"data: the blend changes at sample 40 (new: {folder}/b; left out: {folder}/a); all datasets are read from "
        "their beginning",
    )
    streamed = gone_on(data_of(folder, "a"), {"stream": "0123", "epoch": 0}, 40)
    assert rows(streamed, 40, 48) == rows(data_of(folder, "a"), 0, 8)
    assert "was trained on streamed text" in streamed.notes[0]


def _documents(prefix: Path) -> list[list[int]]:
    with IndexedDataset(prefix) as tokens:
        return [tokens[number].tolist() for number in range(len(tokens))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 7}, "training.seed: the checkpoint was trained on .*/a with 1234, but this run has 7, which changes"),
        ({"seq_length": 4}, "training.seq_length: .* with 8, but this run has 4"),
        ({"data": {"split": "9,1"}}, "data.split: .* documents 0 to 20, but this run has documents 0 to 18"),
        ({"train_iters": 30}, "data.sample_order: .* with 5 epochs shuffled .* has 13 epochs shuffled together"),
        ({"data": {"sample_order": "stable"}}, "data.sample_order: .* this run has each epoch shuffled by itself"),
    ],
)
def test_another_order_of_the_same_data_is_refused(folder: Path, change: State, says: str) -> None:
    order = {"sample_order": "megatron"} if "order" in says else {}
    state = data_of(folder, "a", order).state(40)
    training = {key: value for key, value in change.items() if key != "data"}
    changed = data_of(folder, "a", {**order, **change.get("data", {})}, **training)
    with pytest.raises(DataError, match=says) as caught:
        gone_on(changed, state, 40)
    assert "\n" not in str(caught.value)
    assert gone_on(data_of(folder, "a", order), state, 40).notes == ()


class Numbers:
    """Dataset whose sample n is n."""

    def sample(self, number: int) -> int:
        return number


def test_many_datasets_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairwise comparison would take minutes on every rank for a blend of thousands."""
    compared = 0
    compare = DatasetRecord.holds_the_same

    def counted(self: DatasetRecord, other: DatasetRecord) -> bool:
        nonlocal compared
        compared += 1
        return compare(self, other)

    monkeypatch.setattr(DatasetRecord, "holds_the_same", counted)
    records = [DatasetRecord(f"/d/{n}", f"{n:x}", None, (0, 9), 8, 1, "stable", share=1 / 128) for n in range(128)]
    run = ContinuedDatasets(records, [Numbers()] * 128)
    assert run.restore(json.loads(json.dumps(run.state())), 5) is None
    assert compared == 128
    assert "are in another order" in str(ContinuedDatasets(records[::-1], [Numbers()] * 128).restore(run.state(), 5))


@pytest.mark.parametrize(
    "damage",
    [
        {"later": 1},
        {"sequences": None},
        {"sequences": "ab"},
        {"drawn_twice": 1, "drawn": None},
        {"drawn": -5},
        {"drawn": 1 << 70},
        {"share": "x"},
        {"share": float("nan")},
        {"share": 0.0},
        {"lengths": 5},
    ],
)
def test_an_invalid_position_is_refused(folder: Path, damage: State) -> None:
    data = data_of(folder, "a")
    state = data.state(8)
    assert state is not None
    state["datasets"] = [{**state["datasets"][0], **damage}]
    with pytest.raises(DataError, match="data position is damaged or from another version"):
        gone_on(data, state, 8)


@pytest.mark.parametrize("first", [-8, 16])
def test_a_blend_with_an_impossible_start_is_refused(folder: Path, first: int) -> None:
    state = data_of(folder, "0.3 a 0.7 b").state(8)
    with pytest.raises(DataError, match=r"data position is damaged .*\(sample -?\d+ of 8, 2 datasets\)"):
        gone_on(data_of(folder, "0.5 a 0.5 b"), {**(state or {}), "first": first}, 8)


def test_a_dataset_that_was_prepared_again_is_refused(folder: Path) -> None:
    def describe(bin_sha256: str) -> None:
        Manifest("1" * 64, 1000, 0, 20, 20, 160, 159, 1, bin_sha256, "2" * 64).write(folder / "a")

    describe("3" * 64)
    state = data_of(folder, "a").state(40)
    assert state is not None and state["datasets"][0]["eod"] == 0
    describe("4" * 64)
    with pytest.raises(DataError, match="/a: was prepared again after the checkpoint was written"):
        gone_on(data_of(folder, "a"), state, 40)
    (folder / "a.json").unlink()
    unknown = {**state, "datasets": [{**state["datasets"][0], "marks": None}]}
    assert gone_on(data_of(folder, "a"), state, 40).notes == ()
    # Other tokens of the same lengths, without a manifest.
    write(folder / "a", [[1] * 8] * 20)
    with pytest.raises(DataError, match="/a: was prepared again"):
        gone_on(data_of(folder, "a"), state, 40)
    assert gone_on(data_of(folder, "a"), unknown, 40).notes == ()  # from a version with fewer fields
    write(folder / "a", [[1] * 9] * 20)
    with pytest.raises(DataError, match="/a: was prepared again"):
        gone_on(data_of(folder, "a"), unknown, 40)


@pytest.mark.parametrize("place", [0, 999, 2000, 3999])
def test_another_file_of_the_same_size_is_detected_by_some_of_its_tokens(tmp_path: Path, place: int) -> None:
    tokens = [number % 50 for number in range(4000)]
    write(tmp_path / "a", [tokens])
    with IndexedDataset(tmp_path / "a") as whole:
        marks = whole.marks_digest()
    write(tmp_path / "b", [[*tokens[:place], 50, *tokens[place + 1 :]]])
    write(tmp_path / "short", [[1, 2, 3]])
    with IndexedDataset(tmp_path / "b") as edited, IndexedDataset(tmp_path / "short") as short:
        assert edited.marks_digest() != marks != short.marks_digest()


def test_the_training_loader_checks_the_data_before_it_reads(folder: Path) -> None:
    asked = config({"data_path": f"{folder}/a", "split": "1"}, model={"vocab_size": 1000})
    mesh, progress = ParallelMesh(tp=1, pp=1, dp=1, rank=0), TrainingProgress()
    loader = _build_loader(asked, mesh, data_of(folder, "a"), progress, torch.device("cpu"))
    progress.data_state, progress.consumed_samples = loader.state(8), 8
    loader.close()
    with pytest.raises(DataError, match="training.seed"):
        _build_loader(asked, mesh, data_of(folder, "a", seed=7), progress, torch.device("cpu"))
