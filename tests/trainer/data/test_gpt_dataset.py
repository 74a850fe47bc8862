"""Sample order: Megatron-LM's for the first epoch, another for each that follows, none of it dependent on the run."""

from __future__ import annotations

import errno
import fcntl
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waiting
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.token_files import write
from trainer.data import index_cache
from trainer.data.cache_entry import LEFT_OVER_SECONDS
from trainer.data.epoch_index import EpochIndex, Epochs, build_epoch_index, megatron_epochs
from trainer.data.gpt_dataset import GPTDataset, split_sequences
from trainer.data.index_cache import EpochIndexCache
from trainer.data.indexed_dataset import IndexedDataset

LENGTHS = [3, 1, 9, 4, 4, 7, 12, 1, 1, 5]


def documents() -> list[list[int]]:
    numbers = iter(range(1000))
    return [[next(numbers) for _ in range(length)] for length in LENGTHS]


def walked_one_by_one(texts: list[list[int]], seq_length: int, seed: int) -> list[list[int]]:
    """One epoch as Megatron-LM describes it, document by document and token by token."""
    random = np.random.RandomState(seed)
    order = np.arange(len(texts), dtype=np.int32)
    random.shuffle(order)
    stream = [token for document in order for token in texts[document]]
    samples = []
    start = 0
    while start + seq_length + 1 <= len(stream):
        samples.append(stream[start : start + seq_length + 1])
        start += seq_length
    shuffled = np.arange(len(samples), dtype=np.uint32)
    random.shuffle(shuffled)
    return [samples[number] for number in shuffled]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seq_length=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_first_epoch_is_megatrons(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, seed: int
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "d"
    numbers = iter(range(1000))
    texts = [[next(numbers) for _ in range(length)] for length in lengths]
    write(prefix, texts)
    expected = walked_one_by_one(texts, seq_length, seed)
    with IndexedDataset(prefix) as tokens:
        dataset = GPTDataset(tokens, range(len(tokens)), seq_length, seed)
        assert dataset.samples_per_epoch == len(expected)
        assert [list(dataset.sample(i)) for i in range(len(expected))] == expected


def megatrons(lengths: list[int], seq_length: int, seed: int, num_samples: int) -> list[list[tuple[int, int]]]:
    """The samples of a run as Megatron-LM lays it out, each as (document, place) of its tokens."""
    tokens = sum(lengths)
    epochs = 1
    while epochs * tokens < num_samples * seq_length + 1:
        epochs += 1
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and num_samples - before_last < int(0.80 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    blocks = [epochs - 1, 1] if separate else [epochs]
    order: list[int] = []
    for block in blocks:
        documents = np.array(list(range(len(lengths))) * block, dtype=np.int32)
        random.shuffle(documents)
        order += documents.tolist()
    stream = [(document, place) for document in order for place in range(lengths[document])]
    count = (len(stream) - 1) // seq_length
    cut = before_last if separate else count
    served: list[int] = []
    for numbers in (np.arange(cut, dtype=np.uint32), np.arange(cut, count, dtype=np.uint32)):
        random.shuffle(numbers)
        served += numbers.tolist()
    return [stream[sample * seq_length : sample * seq_length + seq_length + 1] for sample in served]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seq_length=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.integers(0, 60),
)
def test_all_epochs_of_a_run_are_megatrons(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, seed: int, num_samples: int
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "d"
    write(prefix, [[10 * document + place for place in range(size)] for document, size in enumerate(lengths)])
    with IndexedDataset(prefix) as tokens:
        dataset = GPTDataset(tokens, range(len(tokens)), seq_length, seed, num_samples=num_samples)
        if not dataset.has_samples:
            assert num_samples == 0
            return
        expected = [[10 * d + p for d, p in sample] for sample in megatrons(lengths, seq_length, seed, num_samples)]
        assert len(expected) >= num_samples
        assert [list(dataset.sample(number)) for number in range(len(expected))] == expected
        assert list(dataset.sample(len(expected))) == expected[0]


def test_a_last_epoch_that_is_hardly_needed_comes_last() -> None:
    # 100 tokens and samples of 10 + 1: an epoch has 9, and 0.8 of them are 7.
    assert megatron_epochs(100, 10, 9) == Epochs()
    assert megatron_epochs(100, 10, 19) == Epochs(count=2)
    assert megatron_epochs(100, 10, 25) == Epochs(count=3, separate_last=True)
    assert megatron_epochs(100, 10, 26) == Epochs(count=3)


@pytest.mark.parametrize("size", [1, 40])
def test_samples_of_very_many_documents_are_read_whole(tmp_path: Path, size: int) -> None:
    texts = [[number] * (1 + number % size) for number in range(300)]
    write(tmp_path / "d", texts)
    with IndexedDataset(tmp_path / "d") as tokens:
        dataset = GPTDataset(tokens, range(len(tokens)), 200, 3)
        expected = walked_one_by_one(texts, 200, 3)
        assert [list(dataset.sample(i)) for i in range(len(expected))] == expected


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12).filter(sum),
    seq_length=st.integers(1, 150),
    num_samples=st.sampled_from([None, 30]),
    numbers=st.lists(st.integers(0, 60), min_size=1, max_size=12),
)
def test_many_at_once_are_the_same_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    num_samples: int | None,
    numbers: list[int],
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "d"
    write(prefix, [[(7 * number + place) % 500 for place in range(length)] for number, length in enumerate(lengths)])
    with IndexedDataset(prefix) as tokens:
        dataset = GPTDataset(tokens, range(len(tokens)), seq_length, 1, num_samples=num_samples)
        if not dataset.has_samples:
            with pytest.raises(IndexError, match="too few"):
                dataset.windows(np.array(numbers))
            return
        for asked in (numbers, sorted(numbers), range(40)):
            windows = dataset.windows(np.array(asked))
            assert windows.tolist() == [dataset.sample(number).tolist() for number in asked]


def of(epochs: int | Epochs, cache: EpochIndexCache | None = None, seq_length: int = 4, seed: int = 1) -> EpochIndex:
    build = build_epoch_index if cache is None else cache.load_or_build
    wanted = Epochs(epochs) if isinstance(epochs, int) else epochs
    return build(np.array(LENGTHS, np.int32), seq_length, seed, wanted)


def test_numpys_order_is_the_one_of_the_published_runs() -> None:
    # RandomState is frozen by numpy's compatibility policy; were it not, every run would silently change its data.
    index = of(0, seed=1234)
    assert list(index.documents) == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    assert list(index.samples) == [3, 10, 2, 1, 7, 5, 4, 0, 8, 6, 9]


def test_later_epochs_differ_and_cost_nothing_before_they_come(tmp_path: Path) -> None:
    write(tmp_path / "d", documents())
    with IndexedDataset(tmp_path / "d") as tokens:
        dataset = GPTDataset(tokens, range(len(tokens)), 4, 7)
        size = dataset.samples_per_epoch
        far = dataset.sample(10**9)
        assert len(dataset._indexes) == 1
        epochs = [[tuple(dataset.sample(epoch * size + i)) for i in range(size)] for epoch in range(3)]
        assert len(set(map(tuple, epochs))) == 3
        again = GPTDataset(tokens, range(len(tokens)), 4, 7)
        assert tuple(again.sample(2 * size + 1)) == epochs[2][1]
        assert list(again.sample(10**9)) == list(far)
        for epoch in epochs:
            seen = [token for sample in epoch for token in sample[:-1]]
            assert len(seen) == len(set(seen)) == size * 4


def test_a_split_reads_its_own_documents_only(tmp_path: Path) -> None:
    texts = documents()
    write(tmp_path / "d", texts)
    with IndexedDataset(tmp_path / "d") as tokens:
        part = GPTDataset(tokens, range(5, 8), 3, 1)
        own = {token for text in texts[5:8] for token in text}
        assert {int(t) for i in range(part.samples_per_epoch * 2) for t in part.sample(i)} <= own


def test_split_bounds_are_megatrons() -> None:
    shares = (0.949, 0.05, 0.001)
    assert split_sequences(71_669, shares) == [range(68_014), range(68_014, 71_597), range(71_597, 71_669)]
    assert split_sequences(10, (1.0, 0.0, 0.0)) == [range(10), range(10, 10), range(10, 10)]


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
    """A file system with them and one without, as Lustre mounted without flock."""

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuses)


@pytest.mark.usefixtures("locks")
def test_what_a_killed_writer_left_delays_nobody_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_who_comes_second_waits_and_maps_what_the_first_one_wrote(
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
def test_who_has_waited_for_long_builds_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were all of them to write, each would map pages of its own, and another node's might be gone."""
    expected = of(0, EpochIndexCache(tmp_path, smallest=0))
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    with index_cache._claimed(entry):
        monkeypatch.setattr(index_cache, "LONGEST_WAIT", 0.01)
        # Of whoever holds it still.
        later = time.time() + 60
        for claim in tmp_path.iterdir():
            os.utime(claim, (later, later))
        assert same(of(0, EpochIndexCache(tmp_path, smallest=0)), expected)
        assert not entry.exists()


def test_thousands_that_wait_ask_ever_less_often_and_not_together() -> None:
    one, other = (list(itertools.islice(index_cache._pauses(), 12)) for _ in range(2))
    longest = [min(0.02 * 2**number, 2.0) for number in range(12)]
    assert all(
        most / 2 <= pause <= most for pauses in (one, other) for pause, most in zip(pauses, longest, strict=True)
    )
    assert one != other


def test_a_folder_is_read_again_before_an_entry_is_believed_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client remembers for a minute that a file was not there, but for a folder that is read."""
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


def test_only_what_nobody_used_for_long_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "TOUCH_SECONDS", 0.0)
    cache = EpochIndexCache(tmp_path, smallest=0)
    for epoch in range(5):
        of(epoch, cache)
    # Another run may be at any of them.
    assert len(list(tmp_path.iterdir())) == 5
    long_ago = time.time() - index_cache.UNUSED_SECONDS - 1
    for entry in tmp_path.iterdir():
        os.utime(entry, (long_ago, long_ago))
    cache.touch()
    of(5, cache)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_read_from_does_not_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_that_cannot_be_written_costs_only_the_building(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = EpochIndexCache(tmp_path / "file" / "cache", smallest=0)
    assert len(of(0, cache).samples) == 11


def test_what_was_prepared_beside_the_data_is_used_and_not_added_to(tmp_path: Path) -> None:
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
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=build_at_once, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(found) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".index"]
