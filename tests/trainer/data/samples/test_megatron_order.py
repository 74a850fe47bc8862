"""Order of samples and blends against orders recorded from Megatron-LM (tests/record_megatron_order.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.record_megatron_order import BLEND_SPLIT, BLEND_WEIGHTS, SEED, SEQ_LENGTH, SPLIT
from tests.trainer.data.token_files import write_joined
from trainer.config.blends import parse_split
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.loading.build import build_data
from trainer.data.samples.blend import BlendOrder, normalized
from trainer.data.samples.epoch_index import EpochIndex
from trainer.data.samples.gpt_dataset import GPTDataset
from trainer.data.samples.sources import split_sequences
from trainer.planning.build_config import build_config

VOCAB_SIZE = 1_000_000


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    with np.load(Path(__file__).parents[3] / "recorded" / "megatron_data" / "order.npz") as file:
        return dict(file)


def write_counting(prefix: Path, lengths: Any, first: int) -> None:
    write_joined(prefix, first + np.arange(lengths.sum()), lengths, VOCAB_SIZE)


def check_index(data: GPTDataset, sequences: range, recorded: dict[str, Any], place: str) -> EpochIndex:
    (index,) = data._indexes.values()
    assert np.array_equal(index.documents + sequences.start, recorded[f"{place}/document_index"])
    assert np.array_equal(index.samples, recorded[f"{place}/shuffle_index"])
    # Megatron-LM's starts of samples, as (index into the document order, offset); EpochIndex has document ends.
    starts = np.arange(len(recorded[f"{place}/sample_index"])) * SEQ_LENGTH
    documents = np.searchsorted(index.ends, starts, side="right")
    offsets = starts - np.concatenate([[0], index.ends])[documents]
    assert np.array_equal(np.stack([documents, offsets], axis=1), recorded[f"{place}/sample_index"])
    return index


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("run", ["one_epoch", "three_epochs", "last_apart"])
def test_samples_of_a_run(tmp_path: Path, recorded: dict[str, Any], run: str, split: str) -> None:
    place = f"gpt/{run}/{split}"
    write_counting(tmp_path / "d", recorded["gpt/lengths"], 0)
    number = ("train", "valid", "test").index(split)
    with IndexedDataset(tmp_path / "d") as tokens:
        sequences = split_sequences(len(tokens), parse_split(SPLIT))[number]
        assert [sequences.start, sequences.stop] == recorded[f"{place}/range"].tolist()
        size = int(recorded[f"gpt/{run}/sizes"][number])
        data = GPTDataset(tokens, sequences, SEQ_LENGTH, SEED, num_samples=size)
        served = np.stack([data.sample(int(i)) for i in recorded[f"{place}/some"]])
        assert np.array_equal(served, recorded[f"{place}/windows"])
        index = check_index(data, sequences, recorded, place)
        if len(index.documents) == len(sequences):
            stable = GPTDataset(tokens, sequences, SEQ_LENGTH, SEED)
            assert np.array_equal(np.stack([stable.sample(int(i)) for i in recorded[f"{place}/some"]]), served)


@pytest.mark.parametrize("name", ["two", "ten", "equal"])
def test_places_of_a_blend(recorded: dict[str, Any], name: str) -> None:
    order = BlendOrder(recorded[f"weights/{name}/weights"])
    which, sample = recorded[f"weights/{name}/dataset"], recorded[f"weights/{name}/sample"]
    assert [order.place(number) for number in range(len(which))] == list(
        zip(which.tolist(), sample.tolist(), strict=True)
    )


def test_a_blend_of_files_by_weights(tmp_path: Path, recorded: dict[str, Any]) -> None:
    path: list[str] = []
    for number, weight in enumerate(BLEND_WEIGHTS):
        write_counting(tmp_path / str(number), recorded[f"blend/{number}/lengths"], 100_000 * number)
        path += [str(weight), f"{tmp_path}/{number}"]
        with IndexedDataset(tmp_path / str(number)) as tokens:
            sequences = split_sequences(len(tokens), parse_split(BLEND_SPLIT))[0]
            asked = int(recorded["blend/samples_asked"][number])
            part = GPTDataset(tokens, sequences, SEQ_LENGTH, SEED, num_samples=asked)
            part.sample(0)
            index = check_index(part, sequences, recorded, f"blend/{number}")
            assert len(index.samples) == recorded["blend/samples_built"][number]
    order = BlendOrder(normalized(normalized(BLEND_WEIGHTS)))
    places = zip(recorded["blend/dataset"].tolist(), recorded["blend/sample"].tolist(), strict=True)
    assert [order.place(number) for number in range(len(recorded["blend/dataset"]))] == list(places)
    size = int(recorded["blend/size"])
    data = build_data(
        build_config(
            {
                "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": VOCAB_SIZE},
                "training": {
                    **{"train_iters": size // 4, "seq_length": SEQ_LENGTH, "global_batch_size": 4, "seed": SEED},
                    "eval_iters": 0,
                },
                "optimizer": {"lr": 1e-3},
                "data": {"data_path": path, "split": BLEND_SPLIT, "sample_order": "megatron"},
            }
        ),
        0,
        1,
    )
    batches = [batch for step in range(4) for batch in data.micro_batches("train", 4 * step)]
    served = [[*batch.tokens[0].tolist(), int(batch.labels[0, -1])] for batch in batches]
    assert served == recorded["blend/windows"].tolist()
