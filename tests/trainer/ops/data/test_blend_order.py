"""Blend order of the library against numpy's, which is tested against Megatron-LM's recorded order."""

from pathlib import Path

import numpy as np
import pytest

from trainer.data.samples import blend, blend_segments
from trainer.data.samples.batches import BatchShape, TrainData
from trainer.data.samples.blend import BlendedDataset, BlendOrder, normalized
from trainer.data.samples.blend_segments import IN_NUMPY, follow
from trainer.data.samples.compiled_blend import blend_stepper
from trainer.ops.dispatch.library import loaded_path

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def compiled(kernel_library):
    found = blend_stepper(kernel_library.path)
    assert found is not IN_NUMPY
    return found


def weights_of(count):
    return np.array(normalized((np.random.RandomState(count).rand(count) ** 3 + 1e-4).tolist()))


def in_order(found):
    return found.datasets.T.ravel(), found.samples.T.ravel(), found.after


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 100, 401])
def test_the_order_is_that_without_a_compiler(compiled, count):
    weights, counts = weights_of(count), np.zeros(count, np.int64)
    for first in (0, 1 << 14):
        requested = follow(IN_NUMPY, weights, counts, first, 1 << 14)
        found = follow(compiled, weights, counts, first, 1 << 14)
        assert (
            found.datasets.dtype == requested.datasets.dtype == np.int16 and found.after.dtype == requested.after.dtype
        )
        for own, other in zip(in_order(found), in_order(requested), strict=True):
            assert np.array_equal(own, other)
        without = follow(compiled, weights, counts, first, 1 << 14, with_places=False)
        assert np.array_equal(without.after, requested.after) and not without.datasets.size
        counts = requested.after
    assert counts.sum() == 1 << 15 and np.count_nonzero(counts) > 0.8 * count


@pytest.mark.parametrize("length", [1, 2, 4, 16, 64])
def test_the_first_of_equal_shares_is_drawn_in_parts_of_any_length(compiled, length):
    weights = np.full(3, 1 / 3)
    found = follow(compiled, weights, np.zeros(3, np.int64), 0, length)
    assert found.datasets.T.ravel().tolist() == [number % 3 for number in range(length)]
    assert found.samples.T.ravel().tolist() == [number // 3 for number in range(length)]


def test_more_datasets_than_16_bits_count(compiled):
    weights = weights_of(1 << 15)
    start = np.zeros(1 << 15, np.int64)
    requested, found = (follow(stepper, weights, start, 0, 64) for stepper in (IN_NUMPY, compiled))
    assert found.datasets.dtype == np.int32
    assert all(np.array_equal(own, other) for own, other in zip(in_order(found), in_order(requested), strict=True))


def test_parts_with_wrong_guesses_are_computed_again(compiled, monkeypatch):
    weights = weights_of(10)
    requested = follow(IN_NUMPY, weights, np.zeros(10, np.int64), 0, 1 << 12)
    monkeypatch.setattr(blend_segments, "_guess", lambda _, numbers, __: np.zeros((len(numbers), 10), np.int64))
    found = follow(compiled, weights, np.zeros(10, np.int64), 0, 1 << 12)
    assert all(np.array_equal(own, other) for own, other in zip(in_order(found), in_order(requested), strict=True))


class _Numbers:
    def sample(self, number):
        return number


def test_the_library_continues_the_same_order_and_keeps_the_same_counts(tmp_path, kernel_library, monkeypatch):
    monkeypatch.setattr(blend, "BLOCK", 64)
    monkeypatch.setattr(blend, "STRIDE", 512)
    shares = normalized([1, 2, 4.5])
    orders = [BlendOrder(shares, tmp_path / name) for name in ("plain", "compiled")]
    plain, compiled = (BlendedDataset([_Numbers()] * 3, order) for order in orders)
    assert [plain.sample(number) for number in range(100)] == [compiled.sample(number) for number in range(100)]
    assert loaded_path() == kernel_library.path
    data = TrainData({"train": compiled}, 9, BatchShape(1, 1, 4, dp=1, dp_rank=0))
    data.use_library(loaded_path())
    assert orders[1]._stepper is not IN_NUMPY and orders[0]._stepper is IN_NUMPY
    for number in (100, 127, 128, 1600, 5000, 3):
        assert orders[0].place(number) == orders[1].place(number)
        assert orders[0].counts(number).tolist() == orders[1].counts(number).tolist()
    (one,), (other,) = (list((tmp_path / name).iterdir()) for name in ("plain", "compiled"))
    assert one.name == other.name and one.read_bytes() == other.read_bytes()


def test_without_a_library_numpy_is_used(tmp_path):
    (tmp_path / "damaged.so").write_bytes(b"\x7fELF")
    for path in (None, tmp_path / "none.so", tmp_path / "damaged.so", Path(np.__file__)):
        assert blend_stepper(path) is IN_NUMPY
