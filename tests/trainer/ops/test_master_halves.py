"""Masters as bfloat16 weights and remainders: exact, and stepped like float32 masters by every backend."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import call, drawn, here, run
from tests.trainer.ops.test_adamw import CONSTANTS, LOW, MOMENTS, AdamWTensor, arguments, dtypes, numbers
from trainer.ops.adamw import ADAMW
from trainer.ops.master_halves import join_master, split_master
from trainer.optimizer.split_master import SplitMaster

pytestmark = pytest.mark.usefixtures("kernel_library")

EDGES = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF),
    *(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF808000, 0xBF818000, 0x3FFFFFFF, 0xBFFFFFFF),
    # The largest numbers round to infinity.
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),
)
NANS = (0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF)


def of_bits(bits):
    return here(torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32))


def halves(master):
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_master(master.clone(), weight, remainder)
    return weight, remainder


def check_equal(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def is_tie(master):
    return (master.view(torch.int32) & 0xFFFF) == 0x8000


@pytest.mark.parametrize("master", [of_bits(EDGES), drawn((1 << 16,), torch.float32)], ids=["edges", "drawn"])
def test_masters_come_back_to_the_bit_and_weights_are_nearest(master):
    weight, remainder = halves(master)
    assert torch.equal(join_master(weight, remainder).view(torch.int32), master.view(torch.int32))
    usual = master.to(torch.bfloat16)
    tie = is_tie(master)
    assert torch.equal(weight[~tie].view(torch.int16), usual[~tie].view(torch.int16))
    # A tie goes away from zero, to the number of next larger bits.
    above = (master[tie].view(torch.int32) + 0x8000).view(torch.float32)
    assert torch.equal(weight[tie].float(), above)


def test_nan_stays_nan():
    weight, remainder = halves(of_bits(NANS))
    assert weight.isnan().all() and join_master(weight, remainder).isnan().all()


def test_views_of_a_split_master_share_its_memory():
    whole = drawn((24,), torch.float32)
    master = SplitMaster(*halves(whole))
    master[:12].view([3, 4]).narrow(1, 1, 2).copy_(drawn((3, 2), torch.float64, seed=1))
    whole[:12].view(3, 4)[:, 1:3].copy_(drawn((3, 2), torch.float64, seed=1))
    master[20:].zero_()
    whole[20:].zero_()
    target = torch.empty(24)
    master.copy_to(target)
    assert torch.equal(master.joined(), whole) and torch.equal(target, whole)
    assert (master.shape, master.dtype, master.numel(), master.element_size()) == (whole.shape, whole.dtype, 24, 4)


def split_lists(given):
    """The arguments with masters of ``given`` as remainders, and the weights as copies."""
    masters, *others, _, constants = given
    weights, remainders = zip(*map(halves, masters), strict=True)
    return list(remainders), *others, list(weights), constants


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("grad", LOW)
@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_a_step_is_that_of_float32_masters(backend, grad, moments):
    given = arguments((1, 37, 0, 8195, (1 << 16) + 35), grad, torch.bfloat16, moments)
    function = ADAMW.implementations[backend].function
    whole, split = run(function, given)[0], run(function, split_lists(given))[0]
    count = len(given[0])
    remainders, weights = split[:count], split[4 * count :]
    # With moments in bfloat16 the compiler contracts other products and sums for AVX-512.
    is_exact = backend != "native" or moments == MOMENTS[0]
    for master, remainder, weight in zip(whole[:count], remainders, weights, strict=True):
        joined = join_master(weight, remainder)
        check_equal(halves(joined), (weight, remainder))
        torch.testing.assert_close(joined, master, rtol=0 if is_exact else 1e-6, atol=0 if is_exact else 1e-7)
    for one, other in zip(split[2 * count : 4 * count], whole[2 * count : 4 * count], strict=True):
        low = one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0 if is_exact else 8e-3 if low else 1e-6, atol=0)


def test_masters_that_are_not_finite_stay_so():
    """Also NaN as a GPU writes it, all bits of which are set."""
    given = arguments((40,), torch.float32, torch.bfloat16)
    given[1][0][7], given[1][0][8] = torch.inf, torch.nan
    for backend in ("native", "torch", "reference"):
        remainders, *_, weights = run(ADAMW.implementations[backend].function, split_lists(given))[0]
        assert weights.isnan().nonzero().flatten().tolist() == [7, 8]
        assert join_master(weights, remainders).isnan().nonzero().flatten().tolist() == [7, 8]


@pytest.mark.parametrize("copy", [None, torch.float16, torch.float32])
def test_remainders_without_bfloat16_weights_are_refused(copy):
    remainders, *others, _, constants = split_lists(arguments((5, 9), torch.float32, torch.bfloat16))
    copies = [] if copy is None else [torch.zeros(size, dtype=copy) for size in (5, 9)]
    with pytest.raises(RuntimeError, match="masters are int16 remainders, which need copies in bfloat16"):
        ADAMW.implementations["native"].function(remainders, *others, copies, constants)


def check_halves(found, given):
    """Compare remainders and weights with the native step of float32 masters of the same numbers."""
    whole = run(ADAMW.implementations["native"].function, given)[0]
    count = len(given[0])
    for number, master in enumerate(whole[:count]):
        weight, remainder = found[4][number], found[0][number]
        joined = join_master(weight, remainder)
        torch.testing.assert_close(joined, master, rtol=1e-6, atol=1e-7)
        check_equal(halves(joined), (weight, remainder))


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("moments", [MOMENTS[0], MOMENTS[-1]], ids=str)
@pytest.mark.parametrize(("size", "grad", "offset"), placed([1, 123, 8195], LOW))
def test_it_touches_nothing_beside_its_tensors(size, grad, offset, moments):
    given = arguments((size,), grad, torch.bfloat16, moments)
    lists = [[guarded(tensor, offset=offset) for tensor in tensors] for tensors in split_lists(given)[:5]]
    tensor = AdamWTensor(*(tensors[0].data_ptr() for tensors in lists), size)
    places = (ctypes.byref(tensor), ctypes.byref(numbers(CONSTANTS)))
    for part in ((0, size // 3), (size // 3, size)):
        call("llmctl_cpu_adamw", dtypes(grad, torch.bfloat16, *moments, remainders=True), *places, *part, 1)
    check_halves(lists, given)


@pytest.mark.cpu_only
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize(("sizes", "grad", "offset"), placed([(1,), (123, 0, 8195), (3,) * 130], LOW))
def test_cuda_touches_nothing_beside_its_tensors(emulated_cuda: EmulatedCuda, sizes, grad, moments, offset):
    given = arguments(sizes, grad, torch.bfloat16, moments)
    lists = [[guarded(tensor, offset=offset) for tensor in tensors] for tensors in split_lists(given)[:5]]
    tensors = (AdamWTensor * len(sizes))()
    for number, size in enumerate(sizes):
        tensors[number] = AdamWTensor(*(kind[number].data_ptr() for kind in lists), size)
    constants = ctypes.byref(numbers(CONSTANTS))
    types = dtypes(grad, torch.bfloat16, *moments, remainders=True)
    emulated_cuda.call("llmctl_cuda_adamw", types, tensors, len(sizes), constants, None)
    check_halves(lists, given)


@pytest.mark.cpu_only
def test_cuda_keeps_nan(emulated_cuda: EmulatedCuda):
    lists = split_lists(arguments((9,), torch.float32, torch.bfloat16))
    lists[1][0][4] = math.nan
    tensor = AdamWTensor(*(kind[0].data_ptr() for kind in lists[:5]), 9)
    types = dtypes(torch.float32, torch.bfloat16, remainders=True)
    emulated_cuda.call("llmctl_cuda_adamw", types, ctypes.byref(tensor), 1, ctypes.byref(numbers(CONSTANTS)), None)
    assert lists[4][0].isnan().nonzero().flatten().tolist() == [4]
