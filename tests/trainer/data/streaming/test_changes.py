"""Files modified during a run: appended text is ignored, other changes end the run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.trainer.data.streaming.test_streaming import pieces_of, read
from trainer.data.errors import DataError
from trainer.data.streaming.text_pieces import Cursor

Write = Callable[[Path], object]


def lines(first: int, stop: int) -> str:
    return "".join(json.dumps({"text": str(number)}) + "\n" for number in range(first, stop))


def plain(text: str) -> Write:
    return lambda file: file.write_text(text)


def packed(first: int, stop: int) -> Write:
    return lambda file: file.write_bytes(gzip.compress(lines(first, stop).encode()))


def table(first: int, stop: int) -> Write:
    texts = pyarrow.table({"text": [str(number) for number in range(first, stop)]})
    return lambda file: parquet.write_table(texts, file, row_group_size=20)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("whole.jsonl", plain(lines(0, 5)), plain(lines(0, 6))),
        ("cut.jsonl", plain(lines(0, 60)), plain(lines(0, 59))),
        # The writer had not yet finished the last line.
        ("unfinished.jsonl", plain(lines(0, 60) + '{"text": "6'), plain(lines(0, 60) + '{"text": "60"}\n')),
        ("longer.jsonl.gz", packed(0, 60), packed(0, 80)),
        ("shorter.jsonl.gz", packed(0, 60), packed(0, 30)),
        ("other.parquet", table(0, 60), table(100, 180)),
        ("fewer.parquet", table(0, 60), table(0, 20)),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, name: str, before: Write, after: Write) -> None:
    file = tmp_path / name
    before(file)
    pieces = pieces_of(tmp_path)
    after(file)
    with pytest.raises(DataError, match=f"{name} has another size than when the run began; restore it"):
        read(pieces, Cursor())


def test_appended_lines_belong_to_no_piece(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(lines(0, 60))
    pieces = pieces_of(tmp_path)
    file.write_text(lines(0, 90))
    assert sorted(map(int, read(pieces, Cursor()))) == [*range(60)]
