"""The .bin/.idx pair: Megatron-LM's bytes, refusals of damaged files, and writing without traces."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, dtype_code


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> None:
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()


def by_the_book(documents: list[list[int]], vocab_size: int) -> tuple[bytes, bytes]:
    """The two files, value by value from the published layout."""
    code, letter, size = (8, "H", 2) if vocab_size < 65500 else (4, "i", 4)
    sequences = [document for document in documents if document]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    position = 0
    for sequence in sequences:
        index += struct.pack("<q", position)
        position += len(sequence) * size
    seen = 0
    index += struct.pack("<q", 0)
    for document in documents:
        seen += bool(document)
        index += struct.pack("<q", seen)
    return b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences), index


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=6), max_size=8),
    vocab_size=st.sampled_from([1000, 65_499, 65_500, 70_000]),
)
def test_bytes_are_megatrons(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "a.b_document"
    write(prefix, documents, vocab_size)
    expected_bin, expected_idx = by_the_book(documents, vocab_size)
    assert (prefix.parent / "a.b_document.bin").read_bytes() == expected_bin
    assert (prefix.parent / "a.b_document.idx").read_bytes() == expected_idx
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["a.b_document.bin", "a.b_document.idx"]
    with IndexedDataset(prefix) as dataset:
        assert [list(dataset[i]) for i in range(len(dataset))] == [document for document in documents if document]
        assert dataset.document_count == len(documents)
        assert dataset.token_count == sum(map(len, documents))


def test_dtype_changes_at_65500() -> None:
    assert (dtype_code(65_499), dtype_code(65_500)) == (8, 4)


def test_ids_of_a_wide_vocabulary_come_back(tmp_path: Path) -> None:
    write(tmp_path / "d", [[0, 65_535, 65_536, 131_071]], 131_072)
    with IndexedDataset(tmp_path / "d") as dataset:
        assert list(dataset[0]) == [0, 65_535, 65_536, 131_071]


@pytest.mark.parametrize("token", [-1, 1000])
def test_writer_refuses_tokens_outside_the_vocabulary_and_leaves_the_old_pair(tmp_path: Path, token: int) -> None:
    write(tmp_path / "d", [[7, 8]])
    with pytest.raises(DataError, match=rf"d\.bin: document 1 holds token {token}; a vocabulary of 1000"):
        write(tmp_path / "d", [[1], [2, token]])
    with IndexedDataset(tmp_path / "d") as dataset:
        assert list(dataset[0]) == [7, 8]
    assert len(list(tmp_path.iterdir())) == 2


def patched(content: bytes, offset: int, value: bytes) -> bytes:
    return content[:offset] + value + content[offset + len(value) :]


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("d.idx", lambda _: b"not an index at all, rather a text", r"d\.idx: is not a Megatron-LM index"),
        ("d.idx", lambda _: b"", r"d\.idx: is not a Megatron-LM index"),
        ("d.idx", lambda old: old[:20], r"d\.idx: is cut off within its header"),
        ("d.idx", lambda old: old[:-3], r"d\.idx: has \d+ bytes where 3 sequences"),
        ("d.idx", lambda old: patched(old, 9, struct.pack("<Q", 2)), r"d\.idx: is index version 2"),
        ("d.idx", lambda old: patched(old, 17, b"\x07"), r"d\.idx: has dtype code 7"),
        ("d.idx", lambda old: patched(old, 34, struct.pack("<i", 5)), r"d\.idx: its offsets do not follow"),
        ("d.idx", lambda old: patched(old, 70, struct.pack("<q", 1)), r"d\.idx: its document entries"),
        ("d.bin", lambda old: old[:-2], r"d\.bin: has 10 bytes where d\.idx lists 12"),
        ("d.bin", lambda old: old[:-1], r"d\.bin: its 11 bytes are not whole tokens"),
        ("d.bin", lambda old: old * 2, r"d\.bin: has 24 bytes where d\.idx lists 12"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes], says: str
) -> None:
    write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(DataError, match=says) as caught:
        IndexedDataset(tmp_path / "d")
    assert "\n" not in str(caught.value)


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.bin and .*d\.idx: no such file"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d", [[1]])
    (tmp_path / "d.idx").unlink()
    with pytest.raises(DataError, match=r"^[^ ]*d\.idx: no such file"):
        IndexedDataset(tmp_path / "d")


def test_reading_after_close_raises_and_what_was_read_stays(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]])
    dataset = IndexedDataset(tmp_path / "d")
    tokens, lengths = dataset[0], dataset.sequence_lengths
    dataset.close()
    assert list(tokens) == [1, 2, 3]
    assert list(lengths) == [3]
    with pytest.raises(ValueError, match=r"d\.bin: is closed"):
        dataset.read(0, 1)
    with pytest.raises(IndexError):
        dataset[0]


def test_no_read_leaves_the_stream(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]])
    with IndexedDataset(tmp_path / "d") as dataset:
        assert list(dataset.read(1, 3)) == [2, 3]
        with pytest.raises(IndexError):
            dataset.read(2, 4)
        with pytest.raises(IndexError):
            dataset[-1]


def test_large_indexes_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[number % 1000] * (number % 4) for number in range(500)]
    write(tmp_path / "whole", documents)
    monkeypatch.setattr("trainer.data.indexed_dataset.CHUNK", 7)
    write(tmp_path / "pieces", documents)
    assert (tmp_path / "whole.idx").read_bytes() == (tmp_path / "pieces.idx").read_bytes()
    with IndexedDataset(tmp_path / "pieces") as dataset:
        assert np.array_equal(dataset[2], [3, 3, 3])
