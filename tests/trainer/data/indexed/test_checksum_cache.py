"""Cached results about a large file are used only while the file is unchanged."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.data.token_files import write
from trainer.data.errors import DataError
from trainer.data.indexed import checksum_cache
from trainer.data.indexed.checksum_cache import ChecksumCache
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.epoch_index import Epochs, build_epoch_index
from trainer.data.samples.index_cache import EpochIndexCache, LengthsSummary


@pytest.fixture(autouse=True)
def files_are_large_and_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChecksumCache, "MIN_BYTES", 1)
    monkeypatch.setattr(checksum_cache, "STEP_NS", -1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"what it is")
    os.utime(path, (1, 1))
    return path


def changed(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def times_set_back(path: Path) -> None:
    before = path.stat()
    changed(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [changed, replaced, cut, times_set_back])
def test_a_changed_file_has_no_cached_result(file: Path, change: Callable[[Path], None]) -> None:
    known = ChecksumCache(file.parent / "known")
    assert known.recall(file, "whole") is None
    known.keep(file, file.stat(), "whole", b"yes")
    assert ChecksumCache(file.parent / "known").recall(file, "whole") == b"yes"
    assert known.recall(file, "other") is None
    time.sleep(0.02)  # resolution of the file system's clock
    change(file)
    assert known.recall(file, "whole") is None


def test_results_of_a_file_that_is_changing_are_not_cached(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, before = ChecksumCache(file.parent / "known"), file.stat()
    os.utime(file, (2, 2))
    known.keep(file, before, "whole", b"")
    monkeypatch.setattr(checksum_cache, "STEP_NS", 10**12)
    known.keep(file, file.stat(), "whole", b"")
    assert not (file.parent / "known").exists()


def test_damaged_entries_and_those_of_another_boot_are_ignored(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ChecksumCache(file.parent / "known")
    known.keep(file, file.stat(), "whole", b"yes")
    (kept,) = (file.parent / "known").iterdir()
    content = kept.read_bytes()
    for damage in (b"", content[:-1], content + b"x", content[:-1] + b"S"):
        kept.write_bytes(damage)
        assert known.recall(file, "whole") is None
    kept.write_bytes(content)
    assert known.recall(file, "whole") == b"yes"
    (file.parent / "boot").write_text("another")
    monkeypatch.setattr(checksum_cache, "_BOOT", file.parent / "boot")
    assert known.recall(file, "whole") is None


def test_a_folder_that_cannot_be_written_caches_nothing(file: Path) -> None:
    known = ChecksumCache(file / "no folder")
    known.keep(file, file.stat(), "whole", b"")
    assert known.recall(file, "whole") is None


def test_a_checked_index_is_not_read_again_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    known = ChecksumCache(tmp_path / "known")
    first = LengthsSummary.of_sequences(IndexedDataset(tmp_path / "d", known), range(2))
    with monkeypatch.context() as patch:
        patch.setattr(IndexedDataset, "_check_offsets", None)
        patch.setattr(LengthsSummary, "of", None)
        tokens = IndexedDataset(tmp_path / "d", known)
        assert LengthsSummary.of_sequences(tokens, range(2)) == first
        assert [list(tokens[number]) for number in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert first.tokens == 4
    time.sleep(0.02)
    content = (tmp_path / "d.idx").read_bytes()
    (tmp_path / "d.idx").write_bytes(content[:34] + bytes([content[34] ^ 1]) + content[35:])
    with pytest.raises(DataError, match="byte offsets do not match"):
        IndexedDataset(tmp_path / "d", known)


def test_a_checked_entry_is_not_read_again_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, cache = np.array([3, 1, 9, 4], np.int32), EpochIndexCache(tmp_path, smallest=0)
    built = build_epoch_index(lengths, 4, 1, Epochs())
    cache.load_or_build(lengths, 4, 1, Epochs())
    cache.load_or_build(lengths, 4, 1, Epochs())
    with monkeypatch.context() as patch:
        patch.setattr(zlib, "crc32", None)
        cache.load_or_build(lengths, 4, 1, Epochs())
    time.sleep(0.02)
    (entry,) = tmp_path.glob("*.index")
    changed(entry)
    again = cache.load_or_build(lengths, 4, 1, Epochs())
    assert again.ends.tolist() == built.ends.tolist()
    assert again.documents.tolist() == built.documents.tolist()
