"""Text that changes between two attempts: other sizes are rejected, other times reported."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.training_data import by_number, config, same
from trainer.data.errors import DataError
from trainer.data.loading.build import build_data
from trainer.data.prepare.inputs import find_inputs
from trainer.data.samples.batches import TrainData
from trainer.data.streaming.text_pieces import Cursor, Pieces

State = dict[str, Any]
CONSUMED = 72


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four hundred documents in two files, 25 KB."""
    lines = [json.dumps({"text": f"{number} " * (1 + number * 7 % 23)}) + "\n" for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(lines[:300]))
    (tmp_path / "b.jsonl.gz").write_bytes(packed(lines[300:]))
    return tmp_path


def packed(lines: list[str]) -> bytes:
    """Compress ``lines`` without compression, so that the size does not depend on the content."""
    return gzip.compress("".join(lines).encode(), compresslevel=0, mtime=0)


def built(folder: Path) -> TrainData:
    asked = {
        "streaming": True,
        "data_path": str(folder),
        "tokenizer_type": "NullTokenizer",
        "num_workers": 0,
        "split": "80,20",
        "streaming_buffer_mib": 1,
    }
    return build_data(config(asked, model={"vocab_size": 1000}), 0, 1)


def state_of(folder: Path) -> State:
    """Return a checkpoint's state, after batches were read ahead."""
    data = built(folder)
    for consumed in (0, CONSUMED, CONSUMED + 8):
        data.micro_batches("train", consumed)
    state = json.loads(json.dumps(data.state(CONSUMED)))
    assert isinstance(state, dict)
    return state


def gone_on(folder: Path, state: State) -> TrainData:
    data = built(folder)
    data.restore(state, CONSUMED)
    return data


def add_a_document(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"text": "1 2"}\n')


def rename_a_file(folder: Path) -> None:
    (folder / "a.jsonl").rename(folder / "c.jsonl")


@pytest.mark.parametrize("change", [add_a_document, rename_a_file])
def test_text_of_other_names_or_sizes_is_refused(folder: Path, change: Callable[[Path], None]) -> None:
    state = state_of(folder)
    change(folder)
    with pytest.raises(
        DataError, match=r"is of another stream: files or their sizes changed; resume with .*finetune$"
    ) as caught:
        gone_on(folder, state)
    assert "\n" not in str(caught.value)


def test_text_of_another_time_is_reported_and_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of(folder)
    expected = by_number([gone_on(folder, state)], consumed=CONSUMED)
    assert capsys.readouterr().out == ""
    copy = folder / "copy"
    copy.mkdir()
    for name in ("a.jsonl", "b.jsonl.gz"):
        (copy / name).write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
    os.utime(copy / "b.jsonl.gz", ns=(0, 0))
    found = by_number([gone_on(copy, state)], consumed=CONSUMED)
    assert len(expected) == 4
    assert all(same(found[index], expected[index]) for index in expected)
    said = f"data.streaming: files of the text, the newest of which is {copy}/a.jsonl, were written or copied since"
    assert capsys.readouterr().out.startswith(said)
    # A checkpoint of an earlier version has no times.
    del state["times"]
    assert by_number([gone_on(copy, state)], consumed=CONSUMED).keys() == found.keys()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"carry": None},
        {"carry": [[1]]},
        {"carry": [1] * 1000},
        {"carry": [1 << 40]},
        {"first": "x"},
        {"first": -3},
        {"epoch": -1},
        {"epoch": 1 << 40},
        {"place": 1 << 30},
        {"offset": -5},
    ],
)
def test_a_damaged_position_is_refused(folder: Path, damage: State) -> None:
    state = state_of(folder)
    with pytest.raises(DataError, match=r"data.streaming: .*is damaged, or of another version") as caught:
        gone_on(folder, {**state, **damage})
    assert "\n" not in str(caught.value)


def test_truncated_compressed_text_is_reported_with_a_remedy(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "1 2"}\n' * 5000, mtime=0)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    pieces = Pieces(find_inputs([str(tmp_path)]), "file", 1)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read: .*; it is damaged, truncated, .*get it again"):
        list(pieces.rest_of_epoch(Cursor()))
