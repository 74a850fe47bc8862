"""Fine-tuning samples: whole documents, once per epoch, isolated, with the requested loss mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.token_files import write_sequences
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.batches import PackedSample
from trainer.data.samples.best_fit import best_fit
from trainer.data.samples.sample_packing import PackedDataset


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Loads of the bins after best fit decreasing, by a plain loop."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(capacity - room for room in rooms)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 70))
def test_bins_are_those_of_best_fit(lengths: list[int], capacity: int) -> None:
    boxes = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(np.bincount(boxes, lengths).tolist()) == one_by_one(lengths, capacity)


def texts_of(sample: PackedSample) -> list[list[int]]:
    """Documents of a sample, without its padding."""
    parts = list(zip(sample.bounds, sample.bounds[1:], strict=False))
    whole = [[*sample.tokens[start:stop].tolist(), int(sample.labels[stop - 1])] for start, stop in parts]
    for (start, stop), text in zip(parts, whole, strict=True):
        assert sample.labels[start:stop].tolist() == text[1:]
    return [text for text in whole if any(text)]


def numbered(sizes: list[int]) -> list[list[list[int]]]:
    numbers = iter(range(1, 1000))
    return [[[next(numbers) for _ in range(size)]] if size else [] for size in sizes]


SIZES = [5, 0, 9, 2, 3, 12, 1, 9, 4, 4, 7, 2, 8, 3]


def test_every_document_occurs_whole_and_once_per_epoch(tmp_path: Path) -> None:
    documents = numbered(SIZES)
    write_sequences(tmp_path / "d", documents)
    with IndexedDataset(tmp_path / "d") as tokens:
        data = PackedDataset(tokens, range(len(tokens)), 8, seed=3)
        assert (data.documents, data.too_long, data.token_count) == (13, 1, sum(SIZES))
        # 12 tokens do not fit into 8 + 1, and a single token predicts nothing.
        used = sorted(document[0] for document in documents if document and 2 <= len(document[0]) <= 9)
        orders = set()
        for epoch in range(3):
            samples = [data.sample(epoch * data.samples_per_epoch + i) for i in range(data.samples_per_epoch)]
            assert sorted(text for sample in samples for text in texts_of(sample)) == used
            orders.add(str([sample.bounds for sample in samples]))
            for sample in samples:
                filled = sum(len(text) - 1 for text in texts_of(sample))
                assert sample.counts.tolist() == [True] * filled + [False] * (8 - filled)
                assert not sample.tokens[filled:].any() and not sample.labels[filled:].any()
                assert sample.bounds[0] == 0 and sample.bounds[-1] == 8
                assert filled in sample.bounds
        assert len(orders) > 1
        again = PackedDataset(tokens, range(len(tokens)), 8, seed=3)
        for number in (17, 0, 5):
            one, other = data.sample(number), again.sample(number)
            assert one.bounds == other.bounds
            assert one.tokens.tolist() == other.tokens.tolist()


def test_a_split_has_its_own_documents(tmp_path: Path) -> None:
    write_sequences(tmp_path / "d", [[[1, 2], [3, 4]], [], [[5, 6]], [[7, 8], [9]]])
    with IndexedDataset(tmp_path / "d") as tokens:
        middle = PackedDataset(tokens, range(2, 3), 8, seed=0)
        assert texts_of(middle.sample(0)) == [[5, 6]]
        rest = PackedDataset(tokens, range(2, 5), 8, seed=0)
        assert sorted(texts_of(rest.sample(0))) == [[5, 6], [7, 8, 9]]
        nothing = PackedDataset(tokens, range(5, 5), 8, seed=0)
        assert (nothing.samples_per_epoch, nothing.token_count) == (0, 0)
        with pytest.raises(IndexError, match="no document fits into 8"):
            nothing.sample(0)


def test_only_answers_count(tmp_path: Path) -> None:
    documents = [[[11, 12], [13, 14]], [[21], [22, 23], [24, 25], [26]], [[31, 32, 33]], [[41, 42], [43], [44]]]
    write_sequences(tmp_path / "d", documents)
    answers = {13, 14, 22, 23, 26, 32, 33, 42, 44}
    with IndexedDataset(tmp_path / "d") as tokens:
        data = PackedDataset(tokens, range(len(tokens)), 7, seed=1, answers_only=True)
        counted = set()
        for number in range(data.samples_per_epoch):
            sample = data.sample(number)
            assert sorted(map(len, texts_of(sample))) in ([4, 4], [3, 6], [3, 4], [6], [4], [3])
            counted |= set(sample.labels[sample.counts].tolist())
            assert set(sample.labels[~sample.counts].tolist()).isdisjoint(answers)
        assert counted == answers


def test_prompts_that_cannot_be_distinguished_from_answers_are_refused(tmp_path: Path) -> None:
    write_sequences(tmp_path / "d", [[[1, 2, 3]], [[4, 5]]])
    with IndexedDataset(tmp_path / "d") as tokens, pytest.raises(DataError, match="every document is a single"):
        PackedDataset(tokens, range(2), 8, seed=0, answers_only=True)
