"""Sample order: Megatron-LM's in the first epoch, a new one in later epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.token_files import write
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.epoch_index import EpochIndex, Epochs, build_epoch_index, megatron_epochs
from trainer.data.samples.gpt_dataset import GPTDataset
from trainer.data.samples.index_cache import EpochIndexCache
from trainer.data.samples.sources import split_sequences

LENGTHS = [3, 1, 9, 4, 4, 7, 12, 1, 1, 5]


def documents() -> list[list[int]]:
    numbers = iter(range(1000))
    return [[next(numbers) for _ in range(length)] for length in LENGTHS]


def walked_one_by_one(texts: list[list[int]], seq_length: int, seed: int) -> list[list[int]]:
    """One epoch by Megatron-LM's description, with plain loops over documents and tokens."""
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
    """Samples of a run in Megatron-LM's order, each as (document, position) of its tokens."""
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


def test_a_last_epoch_that_is_hardly_needed_is_shuffled_separately() -> None:
    # 100 tokens and samples of 10 + 1: an epoch has 9 samples, of which 0.8 are 7.
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
    # numpy's compatibility policy freezes RandomState; a change would silently change the data of every run.
    index = of(0, seed=1234)
    assert list(index.documents) == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    assert list(index.samples) == [3, 10, 2, 1, 7, 5, 4, 0, 8, 6, 9]


def test_later_epochs_differ_and_are_built_on_demand(tmp_path: Path) -> None:
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
