"""Cache of epoch indexes: reading, repair, a single builder, removal of unused entries."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waiting
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rank_server import rank_context
from tests.trainer.data.samples.test_gpt_dataset import LENGTHS, documents, of
from tests.trainer.data.token_files import write
from tests.waiting import HANG_S
from trainer.data.indexed import cache_entry
from trainer.data.indexed.cache_entry import LEFT_OVER_SECONDS
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples import index_cache
from trainer.data.samples.epoch_index import EpochIndex, Epochs
from trainer.data.samples.gpt_dataset import GPTDataset
from trainer.data.samples.index_cache import EpochIndexCache


def is_mapped(index: EpochIndex) -> bool:
    return not index.ends.flags.owndata and not index.ends.flags.writeable


def same(one: EpochIndex, other: EpochIndex) -> bool:
    names = ("documents", "ends", "samples")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("damage", [b"cut off", b"", bytes(200), "a bit"])
def test_cache_is_read_back_and_repaired(tmp_path: Path, damage: bytes | str) -> None:
    cache = EpochIndexCache(tmp_path / "cache", smallest=0)
    built = of(0)
    assert same(of(0, cache), built)
    (entry,) = (tmp_path / "cache").iterdir()
    content = entry.read_bytes()
    assert is_mapped(of(0, cache))
    entry.write_bytes(damage if isinstance(damage, bytes) else content[:-1] + bytes([content[-1] ^ 1]))
    assert same(of(0, cache), built)
    assert entry.read_bytes() == content
    assert is_mapped(of(0, cache))
    others = [of(0, cache, seed=2), of(1, cache), of(0, cache, seq_length=5), of(Epochs(count=3), cache)]
    others.append(of(Epochs(count=3, separate_last=True), cache))
    assert len(list((tmp_path / "cache").iterdir())) == 6
    assert same(others[-1], of(Epochs(count=3, separate_last=True)))


@pytest.fixture(params=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with file locks and without them, as on Lustre mounted without flock."""

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuses)


@pytest.mark.usefixtures("locks")
def test_leftovers_of_a_killed_writer_delay_nobody_and_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "LONGEST_WAIT", 1.0)
    cache = EpochIndexCache(tmp_path, smallest=0)
    expected = of(0, cache)
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    partial = tmp_path / f".{entry.name}.abc"
    long_ago = time.time() - LEFT_OVER_SECONDS - 1
    for left in (entry.with_suffix(".claim"), entry.with_suffix(".sole"), partial):
        left.touch()
        os.utime(left, (long_ago, long_ago))
    assert same(of(0, cache), expected)
    assert list(tmp_path.iterdir()) == [entry]


@pytest.mark.usefixtures("locks")
def test_the_second_process_waits_and_maps_the_file_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = of(0, EpochIndexCache(tmp_path / "first", smallest=0))
    (written,) = (tmp_path / "first").iterdir()
    entry = tmp_path / "second" / written.name
    monkeypatch.setattr(index_cache, "build_epoch_index", None)
    with ThreadPoolExecutor(1) as threads, index_cache._claimed(entry):
        waiting = threads.submit(of, 0, EpochIndexCache(tmp_path / "second", smallest=0))
        with pytest.raises(Waiting):
            waiting.result(0.05)
        written.replace(entry)
    assert same(waiting.result(), expected)
    assert is_mapped(waiting.result())


@pytest.mark.usefixtures("locks")
def test_a_process_that_has_waited_long_builds_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that builds after a long wait does not write.

    If all processes wrote, each would map separate pages, and pages mapped on another node might vanish.
    """
    expected = of(0, EpochIndexCache(tmp_path, smallest=0))
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    with index_cache._claimed(entry):
        monkeypatch.setattr(index_cache, "LONGEST_WAIT", 0.01)
        # Left by a process that still holds the claim.
        later = time.time() + 60
        for claim in tmp_path.iterdir():
            os.utime(claim, (later, later))
        assert same(of(0, EpochIndexCache(tmp_path, smallest=0)), expected)
        assert not entry.exists()


def test_waiting_processes_poll_at_growing_and_different_intervals() -> None:
    one, other = (list(itertools.islice(index_cache._pauses(), 12)) for _ in range(2))
    longest = [min(0.02 * 2**number, 2.0) for number in range(12)]
    assert all(
        most / 2 <= pause <= most for pauses in (one, other) for pause, most in zip(pauses, longest, strict=True)
    )
    assert one != other


def test_a_folder_is_read_again_before_an_entry_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client caches missing files for a minute, unless their folder is read."""
    expected = of(0, EpochIndexCache(tmp_path, smallest=0))
    look, read = index_cache._open, os.scandir
    is_read = False

    def remembers(*asked: Any) -> EpochIndex | None:
        return look(*asked) if is_read else None

    def reads(folder: Path) -> object:
        nonlocal is_read
        is_read = True
        return read(folder)

    monkeypatch.setattr(index_cache, "_open", remembers)
    monkeypatch.setattr(os, "scandir", reads)
    monkeypatch.setattr(index_cache, "build_epoch_index", None)
    assert same(of(0, EpochIndexCache(tmp_path, smallest=0)), expected)


def test_only_long_unused_entries_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "TOUCH_SECONDS", 0.0)
    cache = EpochIndexCache(tmp_path, smallest=0)
    for epoch in range(5):
        of(epoch, cache)
    # Another run may use any of them.
    assert len(list(tmp_path.iterdir())) == 5
    long_ago = time.time() - cache_entry.UNUSED_SECONDS - 1
    for entry in tmp_path.iterdir():
        os.utime(entry, (long_ago, long_ago))
    cache.touch()
    of(5, cache)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_entry_in_use_does_not_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "TOUCH_SECONDS", 0.0)
    write(tmp_path / "d", documents())
    with IndexedDataset(tmp_path / "d") as tokens:
        cache = EpochIndexCache(tmp_path / "cache", smallest=0)
        dataset = GPTDataset(tokens, range(len(tokens)), 4, 7, cache)
        dataset.sample(0)
        (entry,) = (tmp_path / "cache").iterdir()
        os.utime(entry, (0, 0))
        dataset.sample(1)
        assert entry.stat().st_mtime > 0


def test_an_index_is_read_where_files_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path, *_: object) -> None:
        path.stat()
        raise OSError(errno.ENODEV, "No such device", str(path))

    cache = EpochIndexCache(tmp_path, smallest=0)
    expected = of(0, cache)
    monkeypatch.setattr(index_cache, "map_file", refuses)
    monkeypatch.setattr(index_cache, "build_epoch_index", None)
    assert same(of(0, cache), expected)


def test_without_a_writable_folder_each_process_builds(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = EpochIndexCache(tmp_path / "file" / "cache", smallest=0)
    assert len(of(0, cache).samples) == 11


def test_indexes_beside_the_data_are_used_and_not_added_to(tmp_path: Path) -> None:
    of(0, EpochIndexCache(tmp_path / "beside", smallest=0))
    cache = EpochIndexCache(tmp_path / "run", prepared=tmp_path / "beside", smallest=0)
    assert is_mapped(of(0, cache))
    assert not (tmp_path / "run").exists()
    of(1, cache)
    assert len(list((tmp_path / "beside").iterdir())) == len(list((tmp_path / "run").iterdir())) == 1


def test_small_epochs_leave_no_files(tmp_path: Path) -> None:
    assert len(LENGTHS) + 11 == 21
    assert same(of(0, EpochIndexCache(tmp_path, smallest=22)), of(0))
    assert not list(tmp_path.iterdir())
    of(0, EpochIndexCache(tmp_path, smallest=21))
    assert list(tmp_path.iterdir())


def build_at_once(folder: str, barrier, results) -> None:  # type: ignore[no-untyped-def]
    barrier.wait(120)
    cache = EpochIndexCache(Path(folder), smallest=0)
    index = cache.load_or_build(np.full(20_000, 7, np.int32), 16, 3, Epochs())
    results.put((int(index.samples[17]), int(index.documents[5]), int(index.ends[-1])))


def test_many_processes_start_at_once(tmp_path: Path) -> None:
    context = rank_context()
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=build_at_once, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get(timeout=HANG_S) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(found) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".index"]
