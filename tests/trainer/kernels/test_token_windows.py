"""Windows divided by the library, against numpy's way of it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.batches import BatchShape, Packing, TrainData
from trainer.data.compiled_windows import FEW_TOKENS, window_divider
from trainer.data.window_parts import EndRules, divide_windows
from trainer.kernels.library import loaded_path

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def compiled(kernel_library):
    found = window_divider(kernel_library.path)
    assert found is not divide_windows
    return found


def windows(dtype, rows, length, share):
    random = np.random.RandomState(length)
    found = random.randint(8, 60_000, (rows, length + 1)).astype(dtype)
    found[random.rand(*found.shape) < share] = 7
    # At both borders of a sample, and of what is looked at together.
    found[0, [0, -2, -1]] = found[-1, [min(63, length), min(64, length)]] = 7
    return found


def assert_same(found, wanted):
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.labels, wanted.labels)
    assert found.tokens.dtype == found.labels.dtype == torch.int64 and found.tokens.is_contiguous()
    assert (found.counts is None) == (wanted.counts is None) and (found.ends is None) == (wanted.ends is None)
    if wanted.counts is not None:
        assert found.counts.dtype == wanted.counts.dtype == torch.bool and torch.equal(found.counts, wanted.counts)
    if wanted.ends is not None:
        assert found.ends.bounds == wanted.ends.bounds
        assert found.ends.positions.dtype == torch.int32 and torch.equal(found.ends.positions, wanted.ends.positions)
        own, other = found.ends.documents(1)[0], wanted.ends.documents(1)[0]
        assert own == other and torch.equal(own.positions(torch.device("cpu")), other.positions(torch.device("cpu")))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8, np.dtype(">i4")], ids=str)
@pytest.mark.parametrize("length", [1, 5, 64, 129, 500])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.7, 1.0])
def test_parts_are_those_without_a_compiler(compiled, dtype, length, share):
    given = windows(dtype, 3, length, share)
    for rules in (None, EndRules(7, False, True), EndRules(7, True, True), EndRules(7, True, False)):
        assert_same(compiled(given, rules), divide_windows(given, rules))


@pytest.mark.parametrize("end", [-1, 1 << 16 | 7, (1 << 32) + 7])
def test_a_token_that_there_cannot_be_ends_nothing(compiled, end):
    given = windows(np.uint16, 2, 100, 0.1)
    parts = compiled(given, EndRules(end, True, True))
    assert parts.counts.all() and parts.ends.bounds == ((0, 100), (0, 100))


def test_more_documents_than_there_was_room_for(compiled):
    given = windows(np.uint16, 4, 10 * FEW_TOKENS, 0.5)
    wanted = divide_windows(given, EndRules(7, True, True))
    assert sum(map(len, wanted.ends.bounds)) > 4 * 100
    assert_same(compiled(given, EndRules(7, True, True)), wanted)


def test_parts_of_an_array_are_divided_too(compiled):
    given = windows(np.int32, 6, 300, 0.02)[::2, 100:]
    assert_same(compiled(given, EndRules(7, True, True)), divide_windows(given, EndRules(7, True, True)))


class _Windows:
    def sample(self, number):
        return windows(np.uint16, 3, 200, 0.01)[number % 3]


@pytest.mark.parametrize("rules", [None, Packing(7, True, True, True), Packing(7, restart_positions=True)])
def test_micro_batches_are_the_same_with_it(kernel_library, rules):
    shape = BatchShape(2, 6, 200, dp=1, dp_rank=0)
    plain, with_library = (TrainData({"train": _Windows()}, 60_000, shape, rules) for _ in range(2))
    assert loaded_path() == kernel_library.path
    with_library.use_library(loaded_path())
    for one, other in zip(plain.micro_batches("train", 6), with_library.micro_batches("train", 6), strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)
        assert one.documents == other.documents
        for name in ("positions", "loss_mask"):
            wanted, found = getattr(one, name), getattr(other, name)
            assert wanted is found is None or torch.equal(wanted, found)


def test_without_a_library_numpy_does_it(tmp_path):
    (tmp_path / "damaged.so").write_bytes(b"\x7fELF")
    for path in (None, tmp_path / "none.so", tmp_path / "damaged.so", Path(np.__file__)):
        assert window_divider(path) is divide_windows
