"""Indexed datasets: Megatron-LM's bytes, refusal of damaged files, and atomic writing."""

from __future__ import annotations

import errno
import gc
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.token_files import RECORDED, files_end_at, unpack, write, write_sequences
from trainer.config.formats.indexed_data import DTYPES
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import dtype_code
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.writer import IndexedDatasetWriter


def by_the_book(documents: list[list[int]], vocab_size: int) -> tuple[bytes, bytes]:
    """Both files, value by value from the published layout."""
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


def test_ids_of_a_wide_vocabulary_are_restored(tmp_path: Path) -> None:
    write(tmp_path / "d", [[0, 65_535, 65_536, 131_071]], 131_072)
    with IndexedDataset(tmp_path / "d") as dataset:
        assert list(dataset[0]) == [0, 65_535, 65_536, 131_071]


def patched(content: bytes, offset: int, value: bytes) -> bytes:
    return content[:offset] + value + content[offset + len(value) :]


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("d.idx", lambda _: b"not an index at all, rather a text", r"d\.idx: is not a Megatron-LM index"),
        ("d.idx", lambda _: b"", r"d\.idx: is not a Megatron-LM index"),
        ("d.idx", lambda old: old[:20], r"d\.idx: is truncated within its header"),
        ("d.idx", lambda old: old[:-3], r"d\.idx: has \d+ bytes, but 3 sequences"),
        ("d.idx", lambda old: patched(old, 9, struct.pack("<Q", 2)), r"d\.idx: is index version 2"),
        (
            "d.idx",
            lambda old: patched(old, 17, b"\x07"),
            r"d\.idx: has float32 \(dtype code 7\), which is not an integer",
        ),
        ("d.idx", lambda old: patched(old, 17, b"\x09"), r"d\.idx: has dtype code 9, which is not an integer token"),
        ("d.idx", lambda old: patched(old, 26, b"\xff" * 8), r"d\.idx: has \d+ bytes, but 3 sequences"),
        (
            "d.idx",
            lambda old: old + b"\1\1\1",
            r"d\.idx: is a multimodal index of Megatron-LM, with a mode for each of 3 sequences",
        ),
        ("d.idx", lambda old: patched(old, 34, struct.pack("<i", -3)), r"d\.idx: the byte offsets do not match"),
        ("d.idx", lambda old: patched(old, 54, struct.pack("<q", 8)), r"d\.idx: the byte offsets do not match"),
        ("d.idx", lambda old: patched(old, 34, struct.pack("<i", 5)), r"d\.idx: the byte offsets do not match"),
        ("d.idx", lambda old: patched(old, 70, struct.pack("<q", 1)), r"d\.idx: the document entries"),
        ("d.bin", lambda old: old[:-2], r"d\.bin: has 10 bytes, but d\.idx lists 12"),
        ("d.bin", lambda old: old[:-1], r"d\.bin: its size of 11 bytes is not a multiple of the token size"),
        ("d.bin", lambda old: old * 2, r"d\.bin: has 24 bytes, but d\.idx lists 12"),
        ("d.bin", lambda _: b"", r"d\.bin: has 0 bytes, but d\.idx lists 12"),
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


def test_every_wrong_bit_before_the_documents_is_detected(tmp_path: Path) -> None:
    """Only a checksum detects a bit flip that gives another valid documents' table."""
    write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    index = tmp_path / "d.idx"
    whole = index.read_bytes()
    documents = len(whole) - 4 * 8
    accepted = set()
    for place in range(len(whole)):
        for bit in range(8):
            index.write_bytes(patched(whole, place, bytes([whole[place] ^ 1 << bit])))
            try:
                with IndexedDataset(tmp_path / "d") as dataset:
                    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 3], [4], [5, 6]]
                accepted.add(place)
            except DataError as error:
                assert "\n" not in str(error)
    assert accepted <= set(range(documents, len(whole)))


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.bin and .*d\.idx: no such file"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d", [[1]])
    (tmp_path / "d.idx").unlink()
    with pytest.raises(DataError, match=r"^[^ ]*d\.idx: no such file"):
        IndexedDataset(tmp_path / "d")


def test_reading_after_close_raises_and_earlier_results_stay(tmp_path: Path) -> None:
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


def test_reads_beyond_the_stream_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]])
    with IndexedDataset(tmp_path / "d") as dataset:
        assert list(dataset.read(1, 3)) == [2, 3]
        with pytest.raises(IndexError):
            dataset.read(2, 4)
        with pytest.raises(IndexError):
            dataset[-1]


def test_leftovers_of_a_killed_process_are_not_in_the_next_dataset(tmp_path: Path) -> None:
    write(tmp_path / "new", [[1, 2], [3]])
    for part in ("bin", "idx", "lengths", "documents"):
        (tmp_path / f"again.{part}.partial").write_bytes(bytes(80))
    write(tmp_path / "again", [[1, 2], [3]])
    for part in ("bin", "idx"):
        assert (tmp_path / f"again.{part}").read_bytes() == (tmp_path / f"new.{part}").read_bytes()


def test_large_indexes_are_written_and_checked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[number % 1000] * (number % 4) for number in range(500)]
    write(tmp_path / "whole", documents)
    for module in ("tables", "indexed_dataset"):
        monkeypatch.setattr(f"trainer.data.indexed.{module}.CHUNK", 7)
    write(tmp_path / "pieces", documents)
    assert (tmp_path / "whole.idx").read_bytes() == (tmp_path / "pieces.idx").read_bytes()
    with IndexedDataset(tmp_path / "pieces") as dataset:
        assert np.array_equal(dataset[2], [3, 3, 3])
    index = tmp_path / "pieces.idx"
    last_but_one = index.stat().st_size - 16
    index.write_bytes(patched(index.read_bytes(), last_but_one, struct.pack("<q", 5)))
    with pytest.raises(DataError, match="the document entries do not ascend"):
        IndexedDataset(tmp_path / "pieces")


def test_sequences_of_a_document(tmp_path: Path) -> None:
    write_sequences(tmp_path / "d", [[[1, 2, 3], [4]], [], [[5]]])
    with IndexedDataset(tmp_path / "d") as dataset:
        assert dataset.document_indices.tolist() == [0, 2, 2, 3]
        assert [dataset[i].tolist() for i in range(3)] == [[1, 2, 3], [4], [5]]
        assert dataset.first_tokens(dataset.document_indices).tolist() == [0, 4, 4, 5]


def rewritten(source: Path, target: Path) -> None:
    """Read with IndexedDataset and write with IndexedDatasetWriter."""
    with IndexedDataset(source) as dataset:
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == dataset.dtype)
        with IndexedDatasetWriter(target, code) as writer:
            tokens = dataset.read(0, dataset.token_count)
            writer.append(tokens, dataset.sequence_lengths, dataset.document_indices[1:])
            writer.finish()


RECORDED_DOCUMENTS = [[], [[5, 6, 7]], [], [[1]], [[2], [3, 4]], [[]], []]
"""Documents of sequences for every recorded dtype."""


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64", "uint16", "no_documents", "only_empty"])
def test_megatrons_files_of_every_integer_are_read_and_written_bit_for_bit(tmp_path: Path, name: str) -> None:
    unpack(name, tmp_path)
    documents = {"no_documents": [], "only_empty": [[], []]}.get(name, RECORDED_DOCUMENTS)
    with IndexedDataset(tmp_path / name) as dataset:
        bounds = dataset.document_indices.tolist()
        found = [[dataset[i].tolist() for i in range(*pair)] for pair in zip(bounds, bounds[1:], strict=False)]
        assert found == documents
        assert dataset.dtype.name == name or name in ("no_documents", "only_empty")
    rewritten(tmp_path / name, tmp_path / "again")
    for part in ("bin", "idx"):
        assert (tmp_path / f"again.{part}").read_bytes() == (tmp_path / f"{name}.{part}").read_bytes()


@pytest.mark.parametrize(("name", "says"), [("float32", "has float32"), ("float64", "has float64"), ("modes", "mode")])
def test_megatrons_files_of_other_things_are_refused(tmp_path: Path, name: str, says: str) -> None:
    unpack(name, tmp_path)
    with pytest.raises(DataError, match=says):
        IndexedDataset(tmp_path / name)


@pytest.mark.parametrize("name", ["gpt2_bpe", "sentencepiece"])
@pytest.mark.parametrize("key", ["text", "sentences"])
def test_megatrons_prepared_text_is_read_and_written_bit_for_bit(tmp_path: Path, name: str, key: str) -> None:
    prefix = RECORDED / f"{name}_{key}_document"
    rewritten(prefix, tmp_path / "again")
    for part in ("bin", "idx"):
        assert (tmp_path / f"again.{part}").read_bytes() == prefix.with_name(f"{prefix.name}.{part}").read_bytes()
    lines = [json.loads(line) for line in (RECORDED / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    with IndexedDataset(prefix) as dataset:
        assert dataset.document_count == len(lines)
        assert 0 < dataset.token_count < 10_000
        if key == "sentences":
            longest = max(range(len(lines)), key=lambda place: len(lines[place]["sentences"]))
            first, stop = dataset.document_indices[longest : longest + 2]
            assert stop - first == len(lines[longest]["sentences"])


def test_tables_outlive_their_dataset(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]] * 5000)
    dataset = IndexedDataset(tmp_path / "d")
    tables = dataset.sequence_lengths[1:], dataset.document_indices[1:]
    with pytest.raises(ValueError, match="read-only"):
        tables[0][0] = 9
    del dataset
    gc.collect()
    assert [int(table.sum()) for table in tables] == [3 * 4999, 5000 * 5001 // 2]


def test_open_datasets_hold_no_file_descriptors(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]])
    before = len(list(Path("/proc/self/fd").iterdir()))
    opened = [IndexedDataset(tmp_path / "d") for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [dataset[0].tolist() for dataset in opened] == [[1, 2, 3]] * 20


def test_other_processes_open_the_files_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "d", [[1, 2, 3]] * 1000)
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(IndexedDataset(Path("d")))
    assert len(sent) < 500
    monkeypatch.chdir("/")
    with pickle.loads(sent) as dataset:
        assert dataset[999].tolist() == [1, 2, 3]


def test_files_that_cannot_be_mapped_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, _: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(path))

    write(tmp_path / "d", [[1, 2, 3], [4, 5]])
    monkeypatch.setattr("trainer.data.indexed.mapped_file.map_file", refuse)
    monkeypatch.setattr("trainer.data.indexed.indexed_dataset.map_file", refuse)
    with IndexedDataset(tmp_path / "d") as dataset:
        assert [dataset[i].tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]
        out = np.zeros(3, np.int64)
        dataset.read_into(2, 5, out)
        assert out.tolist() == [3, 4, 5]
        (tmp_path / "d.bin").write_bytes(b"12")
        with pytest.raises(OSError, match=r"d\.bin: ends before number 5; the file has become shorter"):
            dataset.read(2, 5)


@pytest.mark.parametrize("batches", [1, 3], ids=["at the end", "on the way"])
def test_a_full_disk_leaves_the_old_dataset_and_nothing_else(tmp_path: Path, batches: int) -> None:
    write(tmp_path / "d", [[7, 8]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    # The first batch fits into the write buffers; the full disk is only detected when they are flushed.
    tokens, lengths, ends = np.zeros(400_000, np.int64), np.full(100_000, 4), np.arange(1, 100_001)
    disk_full = pytest.raises(OSError, match="File too large")
    with disk_full, files_end_at(1000), IndexedDatasetWriter(tmp_path / "d", 8) as writer:
        for _ in range(batches):
            writer.append(tokens, lengths, ends)
        writer.finish()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
