"""Sample order: Megatron-LM's for the first epoch, another for each that follows, none of it dependent on the run."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.test_indexed_dataset import write
from trainer.data import epoch_index
from trainer.data.epoch_index import EpochIndexCache, build_epoch_index
from trainer.data.gpt_dataset import GPTDataset, split_sequences
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


def test_numpys_order_is_the_one_of_the_published_runs() -> None:
    # RandomState is frozen by numpy's compatibility policy; were it not, every run would silently change its data.
    index = build_epoch_index(np.array(LENGTHS, np.int32), 4, 1234, 0)
    assert list(index.documents) == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    assert list(index.samples) == [3, 10, 2, 1, 7, 5, 4, 0, 8, 6, 9]


def test_later_epochs_differ_and_cost_nothing_before_they_come(tmp_path: Path) -> None:
    write(tmp_path / "d", documents())
    with IndexedDataset(tmp_path / "d") as tokens:
        dataset = GPTDataset(tokens, range(len(tokens)), 4, 7)
        size = dataset.samples_per_epoch
        far = dataset.sample(10**9)
        assert len(dataset._epochs) == 1
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


def test_cache_is_read_back_and_repaired(tmp_path: Path) -> None:
    lengths = np.array(LENGTHS, np.int32)
    cache = EpochIndexCache(tmp_path / "cache", smallest=0)
    built = cache.load_or_build(lengths, 4, 1, 0)
    (entry,) = (tmp_path / "cache").iterdir()
    assert isinstance(cache.load_or_build(lengths, 4, 1, 0).ends, np.memmap)
    (entry / "ends.npy").write_bytes(b"cut off")
    repaired = cache.load_or_build(lengths, 4, 1, 0)
    assert np.array_equal(repaired.ends, built.ends)
    assert isinstance(cache.load_or_build(lengths, 4, 1, 0).ends, np.memmap)
    for changed in ((4, 2, 0), (4, 1, 1), (5, 1, 0)):
        cache.load_or_build(lengths, *changed)
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_dead_writers_claim_delays_nobody_and_expires(tmp_path: Path) -> None:
    lengths = np.array(LENGTHS, np.int32)
    cache = EpochIndexCache(tmp_path, smallest=0)
    expected = cache.load_or_build(lengths, 4, 1, 0)
    (entry,) = tmp_path.iterdir()
    for file in entry.iterdir():
        file.unlink()
    entry.rmdir()
    claim = tmp_path / f"{entry.name}.claim"
    claim.touch()
    assert np.array_equal(cache.load_or_build(lengths, 4, 1, 0).samples, expected.samples)
    assert not entry.exists()
    long_ago = time.time() - epoch_index.CLAIM_SECONDS - 1
    os.utime(claim, (long_ago, long_ago))
    cache.load_or_build(lengths, 4, 1, 0)
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_a_folder_that_cannot_be_written_costs_only_the_building(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = EpochIndexCache(tmp_path / "file" / "cache", smallest=0)
    assert len(cache.load_or_build(np.array(LENGTHS, np.int32), 4, 1, 0).samples) == 11


def test_small_epochs_leave_no_files(tmp_path: Path) -> None:
    cache = EpochIndexCache(tmp_path, smallest=22)
    assert len(LENGTHS) + 11 == 21
    index = cache.load_or_build(np.array(LENGTHS, np.int32), 4, 1, 0)
    assert np.array_equal(index.samples, build_epoch_index(np.array(LENGTHS, np.int32), 4, 1, 0).samples)
    assert not list(tmp_path.iterdir())
    EpochIndexCache(tmp_path, smallest=21).load_or_build(np.array(LENGTHS, np.int32), 4, 1, 0)
    assert list(tmp_path.iterdir())


def build_at_once(folder: str, barrier, results) -> None:  # type: ignore[no-untyped-def]
    barrier.wait(30)
    index = EpochIndexCache(Path(folder), smallest=0).load_or_build(np.full(20_000, 7, np.int32), 16, 3, 0)
    results.put((int(index.samples[17]), int(index.documents[5]), int(index.ends[-1])))


def test_many_processes_start_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=build_at_once, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(found) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [""]
