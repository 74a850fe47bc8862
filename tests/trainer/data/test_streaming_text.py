"""Text that was edited between two attempts of a run is refused; text that was only touched is not."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.training_data import by_number, config, same
from trainer.data.batches import TrainData
from trainer.data.build import build_data
from trainer.data.errors import DataError
from trainer.data.prepare.inputs import find_inputs
from trainer.data.streaming import text_marks
from trainer.data.streaming.pieces import Cursor, Pieces
from trainer.data.streaming.samples import StreamedSamples
from trainer.data.streaming.work import Reading, Share
from trainer.data.streaming.workers import InlineEncoder
from trainer.data.tokenizers.settings import TokenizerSettings

State = dict[str, Any]
CONSUMED = 72
EDITED = r"data.streaming: {}/{} was edited since the checkpoint was written, with the same size .*finetune$"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four hundred documents in two files, 25 KB."""
    lines = [json.dumps({"text": f"{number} " * (1 + number * 7 % 23)}) + "\n" for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(lines[:300]))
    (tmp_path / "b.jsonl.gz").write_bytes(packed(lines[300:]))
    return tmp_path


def packed(lines: list[str]) -> bytes:
    """Of the same number of bytes whatever the lines are."""
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
    """What a checkpoint would hold, after batches were read ahead."""
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


def put(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        file.write(content)


def edit_text(folder: Path) -> str:
    path = folder / "a.jsonl"
    place = path.stat().st_size // 2
    digit = path.read_bytes().index(b" 1", place) + 1
    put(path, digit, b"9")
    return path.name


def edit_quietly(folder: Path) -> str:
    """As ``rsync -a`` and ``cp -p`` would bring another version of it."""
    status = (folder / "a.jsonl").stat()
    edit_text(folder)
    os.utime(folder / "a.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    return "a.jsonl"


def edit_compressed(folder: Path) -> str:
    path = folder / "b.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    path.write_bytes(packed(lines[::-1]))
    return path.name


@pytest.mark.parametrize("edit", [edit_text, edit_quietly, edit_compressed])
def test_an_edit_that_keeps_the_size_is_refused(folder: Path, edit: Callable[[Path], str]) -> None:
    state = state_of(folder)
    name = edit(folder)
    with pytest.raises(DataError, match=EDITED.format(folder, name)) as caught:
        gone_on(folder, state)
    assert "\n" not in str(caught.value)


def test_touched_and_copied_text_is_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of(folder)
    os.utime(folder / "a.jsonl", ns=(0, 0))
    expected = by_number([gone_on(folder, state)], consumed=CONSUMED)
    copy = folder / "copy"
    copy.mkdir()
    for name in ("a.jsonl", "b.jsonl.gz"):
        (copy / name).write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
    found = by_number([gone_on(copy, state)], consumed=CONSUMED)
    assert all(same(found[index], expected[index]) for index in expected)
    assert capsys.readouterr().out == ""
    # A checkpoint of before there were marks.
    del state["text"], state["digest"]
    assert by_number([gone_on(copy, state)], consumed=CONSUMED).keys() == found.keys()


def test_of_much_text_a_part_is_compared_and_what_comes_next_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_marks, "WHOLE_BYTES", 512)
    monkeypatch.setattr(text_marks, "_BLOCK", 64)
    state = state_of(folder)
    os.utime(folder / "a.jsonl", ns=(0, 0))
    expected = by_number([gone_on(folder, state)], consumed=CONSUMED)
    said = f"data.streaming: {folder}/a.jsonl was written to since the checkpoint; the parts of it that were compared"
    assert capsys.readouterr().out.startswith(said)
    # Between two blocks: found when it is read, before it is trained on.
    edit_text(folder)
    data = gone_on(folder, state)
    with pytest.raises(DataError, match=rf"data.streaming: {folder}/a.jsonl no longer gives the tokens"):
        data.micro_batches("train", CONSUMED)
    # A checkpoint of before there were digests of pieces has one of the block.
    data = gone_on(folder, {name: value for name, value in state.items() if name != "seen"})
    with pytest.raises(DataError, match=r"one of 2 files .*\.jsonl(\.gz)? and others, no longer gives"):
        data.micro_batches("train", CONSUMED)
    put(folder / "a.jsonl", -5, b"1")
    with pytest.raises(DataError, match=EDITED.format(folder, "a.jsonl")):
        gone_on(folder, state)
    assert len(expected) == 4


def samples_of(folder: Path) -> StreamedSamples:
    """Of many small blocks of many small pieces."""
    pieces = Pieces(find_inputs([str(folder)]), "file", 1, 300)
    encoder = InlineEncoder(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000), Reading())
    return StreamedSamples(pieces, Share(), encoder, seq_length=16, seed=5, buffer_bytes=2000, kept=50)


@pytest.mark.parametrize("is_resumed", [True, False], ids=["resumed", "running"])
@pytest.mark.parametrize("edit", [edit_text, edit_quietly, edit_compressed])
def test_an_edit_of_what_was_read_never_reaches_a_sample(
    folder: Path, edit: Callable[[Path], str], is_resumed: bool
) -> None:
    whole = samples_of(folder)
    expected = [whole.sample(0)]
    while whole.state(len(expected) - 1)["epoch"] < 3:
        expected.append(whole.sample(len(expected)))
    samples = samples_of(folder)
    # All of the first epoch has been read, whose pieces come in another order in the second.
    number = 0
    while samples.state(number)["epoch"] == 0:
        number += 1
        samples.sample(number)
    if is_resumed:
        state = json.loads(json.dumps(samples.state(number)))
        samples = samples_of(folder)
        samples.restore(state)
    name = edit(folder)
    found = 0
    with pytest.raises(DataError, match=rf"data.streaming: {folder}/{name} no longer gives the tokens"):
        for place in range(number, len(expected)):
            assert samples.sample(place).tolist() == expected[place].tolist()
            found += 1
    # Text that is as it was goes on to the end.
    assert 0 < found < len(expected) - number


def test_files_beyond_number_share_marks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (folder / f"c{number}.jsonl").write_text('{"text": "1 2"}\n')
    monkeypatch.setattr(text_marks, "MOST_MARKS", 4)
    state = state_of(folder)
    assert len(state["text"]) == 4
    put(folder / "c7.jsonl", 10, b"3")
    with pytest.raises(DataError, match=r"/c7.jsonl or one of the 2 files after it was edited"):
        gone_on(folder, state)


@pytest.mark.parametrize(
    "damage",
    [
        {"text": None},
        {"text": [[1, 2]]},
        {"text": [[1], [2]]},
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
        {"seen": None},
        {"seen": {"units": "AAAA", "streams": []}},
        {"seen": {"units": "no base 64", "streams": []}},
    ],
)
def test_a_damaged_place_is_refused(folder: Path, damage: State) -> None:
    state = state_of(folder)
    with pytest.raises(DataError, match=r"data.streaming: .*is damaged, or of another version") as caught:
        gone_on(folder, {**state, **damage})
    assert "\n" not in str(caught.value)


def test_compressed_text_that_is_cut_off_is_said_with_what_to_do(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "1 2"}\n' * 5000, mtime=0)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    pieces = Pieces(find_inputs([str(tmp_path)]), "file", 1)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read: .*; it is damaged, cut off, .*get it anew"):
        list(pieces.rest_of_epoch(Cursor()))
