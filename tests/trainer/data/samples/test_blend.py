"""Blends: Megatron-LM's order at any position, for any weights."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.samples import blend, blend_segments
from trainer.data.samples.blend import BlendedDataset, BlendOrder, normalized

WEIGHTS = {
    "two": [30, 70],
    "equal": [1, 1, 1],
    "ties": [0.25, 0.5, 0.125, 0.125],
    "one": [3],
    "many": [1 / (1 + number) for number in range(40)],
    "extreme": [1e-9, 1, 1e-4, 0.3, 1e-3],
}


def drawn_one_by_one(weights: list[float], size: int) -> list[tuple[int, int]]:
    """The published rule: the dataset farthest behind its share, the first of equals."""
    counts = [0] * len(weights)
    places = []
    for number in range(size):
        errors = [weight * max(number, 1.0) - count for weight, count in zip(weights, counts, strict=True)]
        dataset = errors.index(max(errors))
        places.append((dataset, counts[dataset]))
        counts[dataset] += 1
    return places


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "BLOCK", 64)
    monkeypatch.setattr(blend, "STRIDE", 512)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_the_order_is_megatrons(weights: list[float]) -> None:
    shares = normalized(weights)
    order = BlendOrder(shares)
    assert [order.place(number) for number in range(5000)] == drawn_one_by_one(shares, 5000)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), st.integers(0, 3000))
def test_every_position_is_the_same_from_any_start(weights: list[float], number: int) -> None:
    shares = normalized(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "BLOCK", 64)
        patch.setattr(blend, "STRIDE", 512)
        assert BlendOrder(shares).place(number) == drawn_one_by_one(shares, number + 1)[-1]


@pytest.mark.usefixtures("small")
def test_positions_before_and_beyond_the_computed_part() -> None:
    shares = normalized(WEIGHTS["many"])
    order, expected = BlendOrder(shares), drawn_one_by_one(shares, 2000)
    for number in (1999, 0, 63, 64, 511, 512, 1023, 100, 1024, 1025):
        assert order.place(number) == expected[number]


@pytest.mark.usefixtures("small")
def test_kept_counts_are_used_only_if_undamaged(tmp_path: Path) -> None:
    shares = normalized(WEIGHTS["two"])
    expected = drawn_one_by_one(shares, 1600)
    assert BlendOrder(shares, tmp_path / "cache").place(1599) == expected[1599]
    (file,) = (tmp_path / "cache").iterdir()
    kept = np.frombuffer(file.read_bytes(), "<i8").reshape(-1, 2)
    assert kept.sum(axis=1).tolist() == [512, 1024, 1536]
    again = BlendOrder(shares, tmp_path / "cache")
    assert len(again._kept) == 4
    assert again.place(1599) == expected[1599]
    for damage in (file.read_bytes()[:-8], file.read_bytes()[::-1], b""):
        file.write_bytes(damage)
        damaged = BlendOrder(shares, tmp_path / "cache")
        assert len(damaged._kept) == 1
        assert damaged.place(1599) == expected[1599]
    assert len(BlendOrder(shares, tmp_path / "cache")._kept) == 4
    assert len(BlendOrder(normalized([1, 2]), tmp_path / "cache")._kept) == 1
    (tmp_path / "file").touch()
    assert BlendOrder(shares, tmp_path / "file" / "cache").place(1599) == expected[1599]


@pytest.mark.usefixtures("small")
def test_long_unused_counts_are_removed(tmp_path: Path) -> None:
    shares = {name: normalized(WEIGHTS[name]) for name in ("two", "equal", "ties")}
    kept = {}
    for name in ("two", "equal"):
        before = set(tmp_path.iterdir())
        BlendOrder(shares[name], tmp_path).place(600)
        (kept[name],) = set(tmp_path.iterdir()) - before
        os.utime(kept[name], (0, 0))
    BlendOrder(shares["equal"], tmp_path)  # which marks the file as in use
    BlendOrder(shares["ties"], tmp_path).place(600)
    assert not kept["two"].exists() and kept["equal"].exists()


def test_segments_with_wrong_guesses_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = normalized(WEIGHTS["extreme"])
    expected = drawn_one_by_one(shares, 2000)
    monkeypatch.setattr(blend, "BLOCK", 1024)
    monkeypatch.setattr(
        blend_segments, "_guess", lambda weights, numbers, _: np.zeros((len(numbers), len(weights)), np.int64)
    )
    order = BlendOrder(shares)
    assert [order.place(number) for number in range(2000)] == expected


def test_more_datasets_than_16_bits_count() -> None:
    shares = normalized([1 + number % 7 for number in range(1 << 15)])
    order, expected = BlendOrder(shares), drawn_one_by_one(shares, 40)
    assert [order.place(number) for number in range(40)] == expected


class Counted:
    """Dataset number ``name``, whose samples equal their numbers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def sample(self, number: int) -> str:
        return f"{self.name}{number}"


def test_samples_are_those_of_the_datasets_in_turn() -> None:
    blended = BlendedDataset([Counted("a"), Counted("b")], BlendOrder([0.25, 0.75]))
    assert [blended.sample(number) for number in range(8)] == ["b0", "a0", "b1", "b2", "a1", "b3", "b4", "b5"]


class Windows(Counted):
    """Samples of many ``numbers`` at once."""

    def windows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.stack([numbers + 1000 * ord(self.name), numbers], axis=1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_many_at_once_are_the_samples_in_turn(names: str) -> None:
    order = BlendOrder(normalized([1 + number for number in range(len(names))]))
    blended = BlendedDataset([Windows(name) for name in names], order)
    numbers = np.array([0, 1, 5, 30, 62, 63, 64, 65, 66, 200, 201])
    places = [order.place(int(number)) for number in numbers]
    expected = [[within + 1000 * ord(names[dataset]), within] for dataset, within in places]
    assert blended.windows(numbers).tolist() == expected
