"""Sums of squares over tensors: C++ loops, and CUDA kernels on the emulated GPU."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import ORDERS, EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import (
    DTYPES,
    call,
    check_threads,
    drawn,
    poisoned,
    sparse_tensor,
)
from trainer.ops.tensor_lists import L2_NORM

pytestmark = pytest.mark.usefixtures("kernel_library")

SIZES = ((1,), (17, 0, 8191), (1 << 16, (1 << 16) + 3, 123))


def tensors(sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [drawn((size,), dtype, seed=number) for number, size in enumerate(sizes)]


def exact_squares(values: list[torch.Tensor]) -> float:
    return math.fsum(value for tensor in values for value in tensor.double().square().tolist())


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("sizes", SIZES)
def test_sum_of_squares_is_exact_to_double(sizes, dtype):
    values = tensors(sizes, dtype)
    with poisoned():
        found = L2_NORM.implementations["native"].function(values)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(exact_squares(values), rel=1e-13)


@pytest.mark.parametrize("sizes", [(0,), (0, 0)])
def test_no_elements_have_sum_zero(sizes, dtype):
    assert L2_NORM.implementations["native"].function(tensors(sizes, dtype)).item() == 0.0


@pytest.mark.cpu_only
@pytest.mark.parametrize("sizes", SIZES)
def test_reference_torch_is_right(sizes, dtype):
    values = tensors(sizes, dtype)
    found = L2_NORM.implementations["reference"].function(values).item()
    # torch adds 16-bit squares one after another, in float32.
    factor = 8 if dtype.itemsize > 2 else 64
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert found == pytest.approx(exact_squares(values), rel=factor * eps)


def test_squares_beyond_float_are_no_overflow():
    huge = [torch.full((100,), 1e30)]
    assert L2_NORM.implementations["native"].function(huge).item() == pytest.approx(1e62, rel=1e-6)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 16, 17, 70_000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nonfinite_elements_show(backend, bad, place, dtype):
    values = [torch.ones(70_002, dtype=dtype), torch.ones(5, dtype=dtype)]
    assert L2_NORM.implementations[backend].function(values).isfinite()
    values[0][place] = bad
    assert not L2_NORM.implementations[backend].function(values).isfinite()


@pytest.mark.cpu_only
def test_threads_do_not_matter():
    values = tensors((1 << 18, 5), torch.float32)
    check_threads(L2_NORM.implementations["native"].function, (values,))


def test_mismatched_arguments_are_refused():
    for given, sentence in (
        ([torch.ones(2), torch.ones(2).double()], "more than one dtype"),
        ([torch.ones(4)[::2]], "not contiguous"),
        ([torch.ones(2, dtype=torch.int64)], "float32, bfloat16, float16 and float64 only"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            torch.ops.llmctl.sum_of_squares(given)


@pytest.mark.cpu_only
def test_beyond_32_bit_indices():
    count, tail = (1 << 31) + 64, 24
    values = sparse_tensor((count,), torch.float32)
    values[-tail:] = drawn((tail,), torch.float32)
    total = torch.zeros((), dtype=torch.float64)
    call("llmctl_cpu_sum_of_squares", torch.float32, values, total, count - tail, count)
    assert total.item() == pytest.approx(exact_squares([values[-tail:]]), rel=1e-13)


def on_gpu(
    values: list[torch.Tensor], offset: int | None
) -> tuple[list[torch.Tensor], ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64]]:
    there = [guarded(value, offset=offset) for value in values]
    pointers = (ctypes.c_void_p * len(there))(*(value.data_ptr() for value in there))
    return there, pointers, (ctypes.c_int64 * len(there))(*(value.numel() for value in there))


@pytest.mark.cpu_only
def test_cuda_beyond_32_bit_indices(emulated_cuda: EmulatedCuda):
    count, tail = (1 << 31) + 64, 24
    values = sparse_tensor((count,), torch.float32)
    values[-tail:] = drawn((tail,), torch.float32)
    pointers, numels = (ctypes.c_void_p * 1)(values.data_ptr()), (ctypes.c_int64 * 1)(count)
    chunks = -(-count // emulated_cuda.size("llmctl_cuda_list_chunk"))
    # Zeros for the sums of the blocks that do not run.
    partial, total = torch.zeros(chunks, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call("llmctl_cuda_sum_of_squares", torch.float32, pointers, numels, 1, partial, total)
    assert total.item() == pytest.approx(exact_squares([values[-tail:]]), rel=1e-13)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("sizes", "dtype", "offset"), placed([(1,), (123, 0, 16387), (3,) * 330], DTYPES))
def test_cuda_touches_nothing_beside_its_tensors(emulated_cuda: EmulatedCuda, sizes, dtype, offset):
    values = tensors(sizes, dtype)
    there, pointers, numels = on_gpu(values, offset)
    chunk = emulated_cuda.size("llmctl_cuda_list_chunk")
    partial = guarded(torch.full((sum(-(-size // chunk) for size in sizes),), torch.nan, dtype=torch.float64))
    total = guarded(torch.full((1,), torch.nan, dtype=torch.float64))
    for order in ORDERS:
        with emulated_cuda.order(order):
            emulated_cuda.call("llmctl_cuda_sum_of_squares", dtype, pointers, numels, len(sizes), partial, total)
        assert total.item() == pytest.approx(exact_squares(values), rel=1e-13)
        assert all(torch.equal(value, given) for value, given in zip(there, values, strict=True))
    there[-1][-1] = math.nan
    emulated_cuda.call("llmctl_cuda_sum_of_squares", dtype, pointers, numels, len(sizes), partial, total)
    assert math.isnan(total.item())
