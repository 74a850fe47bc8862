"""AdamW over lists: the C++ loops, and the CUDA kernel on the emulated GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded, placed
from tests.trainer.ops.op_checks import (
    DTYPE_NUMBERS,
    call,
    check_against_oracle,
    check_errors,
    check_threads,
    drawn,
    in_float64,
    interface,
    run,
    sparse_tensor,
)
from trainer.ops.adamw import ADAMW, AdamWConstants

pytestmark = pytest.mark.usefixtures("kernel_library")

LOW = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((1,), (37,), (8191, 0, 123, 5), (1 << 16, (1 << 16) + 3))
MOMENTS = tuple(product((torch.float32, torch.bfloat16), repeat=2))
CONSTANTS = AdamWConstants(1e-2, 0.9, 0.95, 1e-8, 0.1, step=3, divisor=7.0)


class AdamWTensor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("master", "grad", "exp_avg", "exp_avg_sq", "copy")] + [
        ("numel", ctypes.c_int64)
    ]


class AdamWDtypes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("grad", "copy", "exp_avg", "exp_avg_sq", "has_remainders")]


class AdamWNumbers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double)
        for name in (
            "learning_rate",
            "beta1",
            "beta2",
            "epsilon",
            "weight_decay",
            "correction1",
            "correction2",
            "divisor",
        )
    ]


def arguments(
    sizes: Sequence[int], grad: torch.dtype, copy: torch.dtype | None, moments: tuple = (torch.float32, torch.float32)
) -> tuple:
    def lists(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        return [drawn((size,), dtype, seed=seed + number) for number, size in enumerate(sizes)]

    squares = [one.square().to(moments[1]) for one in lists(torch.float32, 30)]
    copies = [] if copy is None else lists(copy, 40)
    return lists(torch.float32, 0), lists(grad, 10), lists(moments[0], 20), squares, copies, CONSTANTS


def dtypes(*given: torch.dtype | None, remainders: bool = False):
    """Of gradients, copies and the moments, in C; moments are float32 if they are left out."""
    given = (*given, *(torch.float32,) * (4 - len(given)))
    return ctypes.byref(AdamWDtypes(*(DTYPE_NUMBERS[one or torch.float32] for one in given), remainders))


def numbers(constants: AdamWConstants) -> AdamWNumbers:
    c = constants
    corrections = (1.0 - c.beta1**c.step, 1.0 - c.beta2**c.step)
    return AdamWNumbers(c.learning_rate, c.beta1, c.beta2, c.epsilon, c.weight_decay, *corrections, c.divisor)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("copy", [None, *LOW])
@pytest.mark.parametrize("grad", LOW)
@pytest.mark.parametrize("sizes", SIZES)
def test_errors_are_those_of_rounding(sizes, grad, copy):
    check_against_oracle(ADAMW, "native", arguments(sizes, grad, copy), consumes=True)


@pytest.mark.parametrize("copy", [None, *LOW])
@pytest.mark.parametrize("grad", LOW)
def test_errors_of_torch_are_those_of_rounding(grad, copy):
    given = arguments((123, 4097), grad, copy)
    found, usual = (run(ADAMW.implementations[backend].function, given)[0] for backend in ("torch", "reference"))
    right, *_ = run(ADAMW.implementations["reference"].function, in_float64(given))
    # torch's step leaves the divided gradients in place.
    check_errors(*(results[:2] + results[4:] for results in (found, usual, right)))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("copy", [None, torch.bfloat16])
@pytest.mark.parametrize("moments", MOMENTS[1:], ids=str)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_moments_in_bfloat16_are_rounded_once(backend, moments, copy):
    """The masters are those of float32 moments of the same values; the moments are rounded to nearest afterwards."""
    low = arguments((1, 37, 8195), torch.float32, copy, moments)
    wide = (*low[:2], *([one.float() for one in kind] for kind in low[2:4]), *low[4:])
    found, expected = (run(ADAMW.implementations[backend].function, given)[0] for given in (low, wide))
    for kind, number in product(range(5 if copy else 4), range(3)):
        own, other = found[3 * kind + number], expected[3 * kind + number]
        if kind in (2, 3):
            assert own.dtype == moments[kind - 2]
        # The compiler may contract other products and sums: a number next to a tie goes to the other neighbour.
        torch.testing.assert_close(own, other.to(own.dtype), rtol=8e-3 if own.dtype == torch.bfloat16 else 1e-6, atol=0)
        assert (own != other.to(own.dtype)).sum() <= own.numel() * (1 / 500 if own.dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_bfloat16_moments_train_as_float32_moments_do(backend):
    """A least-squares problem reaches the same loss within 2%."""
    target, losses = drawn((256,), torch.float32, seed=1), []
    for dtype in (torch.float32, torch.bfloat16):
        masters, averages, squares = torch.zeros(256), torch.zeros(256, dtype=dtype), torch.zeros(256, dtype=dtype)
        for step in range(1, 61):
            grads = [masters - target]
            lists = ([masters], grads, [averages], [squares], [])
            ADAMW.implementations[backend].function(*lists, replace(CONSTANTS, step=step, divisor=1.0))
        losses.append(float((masters - target).square().mean()))
    assert losses[0] < 0.9 * float(target.square().mean())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_many_steps_are_those_of_torch(backend):
    weights = [drawn((size,), torch.float32, seed=size) for size in (17, 300)]
    masters = [weight.clone() for weight in weights]
    parameters = [torch.nn.Parameter(weight.double()) for weight in weights]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    averages, squares = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    for step in range(1, 21):
        grads = [drawn(master.shape, torch.float32, seed=100 + step) for master in masters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.double() / 7.0
        optimizer.step()
        ADAMW.implementations[backend].function(masters, grads, averages, squares, [], replace(CONSTANTS, step=step))
    for master, parameter, weight in zip(masters, parameters, weights, strict=True):
        moved = (parameter.detach() - weight).abs().max()
        assert moved > 0.01
        assert (master - parameter.detach()).abs().max() <= 1e-5 * moved


@pytest.mark.parametrize("dtype", LOW[1:], ids=str)
def test_examples_are_calls_of_training(dtype):
    """The example has float32 gradients and 16-bit weights."""
    here = torch.device("cpu")
    for example in ADAMW.examples:
        with here:
            _, grads, _, _, copies, _ = example(here, dtype, torch.Generator("cpu").manual_seed(1))
        assert {grad.dtype for grad in grads} == {torch.float32} and {copy.dtype for copy in copies} == {dtype}


def test_copies_are_the_masters_rounded():
    masters, grads, averages, squares, copies, constants = arguments((999,), torch.float32, torch.bfloat16)
    ADAMW.implementations["native"].function(masters, grads, averages, squares, copies, constants)
    assert torch.equal(copies[0], masters[0].to(torch.bfloat16))


def test_gradients_that_are_not_finite_follow_arithmetic():
    masters, grads, averages, squares, copies, constants = arguments((40,), torch.float32, None)
    grads[0][7], grads[0][8] = torch.inf, torch.nan
    ADAMW.implementations["native"].function(masters, grads, averages, squares, copies, constants)
    assert masters[0].isnan().nonzero().flatten().tolist() == [7, 8]


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("past_caches", [0, 1])
@pytest.mark.parametrize("copy", [None, *LOW])
@pytest.mark.parametrize("moments", [(torch.float32,) * 2, (torch.bfloat16,) * 2], ids=str)
@pytest.mark.parametrize(("size", "grad", "offset"), placed([1, 123, 8195], LOW))
def test_it_touches_nothing_beside_its_tensors(size, grad, offset, moments, copy, past_caches):
    given = arguments((size,), grad, copy, moments)
    lists = [[guarded(tensor, offset=offset) for tensor in tensors] for tensors in given[:5]]
    tensor = AdamWTensor(*(tensors[0].data_ptr() if tensors else None for tensors in lists), size)
    places = (ctypes.byref(tensor), ctypes.byref(numbers(CONSTANTS)))
    # Two parts, of which the second is not aligned to a cache line.
    for part in ((0, size // 3), (size // 3, size)):
        call("llmctl_cpu_adamw", dtypes(grad, copy, *moments), *places, *part, past_caches)
    found = [tensor for tensors in lists for tensor in tensors]
    usual, *_ = run(ADAMW.implementations["reference"].function, given)
    right, *_ = run(ADAMW.implementations["reference"].function, in_float64(given))
    check_errors(found, usual, right)
    assert copy is None or torch.equal(found[4], found[0].to(copy))


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
def test_copies_do_not_depend_on_where_a_tensor_is_cut():
    """This includes subnormal masters, which the rounding instruction flushes to 0."""
    size, found = 203, []
    for past_caches, cuts in ((0, (0, size)), (1, (0, size)), (0, (0, 7, 90, size)), (1, (0, 7, 90, size))):
        masters, grads, averages, squares, copies, _ = arguments((size,), torch.bfloat16, torch.bfloat16)
        masters[0].fill_(1e-39)
        averages[0].zero_()
        grads[0].zero_()
        tensor = AdamWTensor(*(one[0].data_ptr() for one in (masters, grads, averages, squares, copies)), size)
        places = (ctypes.byref(tensor), ctypes.byref(numbers(CONSTANTS)))
        for part in pairwise(cuts):
            call("llmctl_cpu_adamw", dtypes(torch.bfloat16, torch.bfloat16), *places, *part, past_caches)
        found.append(copies[0])
    for copy in found:
        assert torch.equal(copy, found[0])
        assert copy.unique().numel() == 1


@pytest.mark.cpu_only
def test_large_lists_go_past_the_caches_and_give_the_same():
    # At 16 bytes per weight, this exceeds half of caches of up to 128 MiB.
    sizes = ((1 << 22) + 3, 5)
    check_against_oracle(ADAMW, "native", arguments(sizes, torch.bfloat16, torch.bfloat16), consumes=True)


@pytest.mark.cpu_only
def test_threads_do_not_matter():
    check_threads(ADAMW.implementations["native"].function, arguments((1 << 17, 3, 1 << 17), torch.float32, None))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: a[1].pop(), "there are 1 grads for 2 masters"),
        (lambda a: a[2].__setitem__(1, torch.zeros(4)), "number 1 of exp_avgs is not like its master"),
        (lambda a: a[3].__setitem__(0, a[3][0].double()), "exp_avg_sqs have more than one dtype"),
        (lambda a: a[0].__setitem__(1, torch.zeros(18)[::2]), "one of masters is not contiguous"),
        (lambda a: a[2].__setitem__(slice(None), [one.half() for one in a[2]]), "exp_avgs are neither float32 nor bfl"),
        (lambda a: a[3].__setitem__(1, a[2][1]), "two of the tensors that it changes share memory"),
    ],
)
def test_mismatched_arguments_are_refused(change, sentence):
    given = arguments((5, 9), torch.float32, None)
    change(given)
    with pytest.raises(RuntimeError, match=sentence):
        ADAMW.implementations["native"].function(*given)


def test_steps_are_counted_from_one():
    with pytest.raises(RuntimeError, match="counted from 1"):
        ADAMW.implementations["native"].function(*arguments((5,), torch.float32, None)[:-1], replace(CONSTANTS, step=0))


def many_elements():
    """Lists of one tensor beyond 2^31 elements, zero except the last, and expected results."""
    count, tail = (1 << 31) + 64, 24
    given = [sparse_tensor((count,), torch.float32) for _ in range(4)]
    small = arguments((tail,), torch.float32, None)
    for whole, (part,) in zip(given, small[:4], strict=True):
        whole[-tail:] = part
    tensor = AdamWTensor(*(whole.data_ptr() for whole in given), None, count)
    usual, *_ = run(ADAMW.implementations["reference"].function, small)
    right, *_ = run(ADAMW.implementations["reference"].function, in_float64(small))
    return tensor, given, tail, usual, right


@pytest.mark.cpu_only
def test_beyond_32_bit_indices():
    tensor, given, tail, usual, right = many_elements()
    library, count = interface(), tensor.numel
    library.llmctl_cpu_adamw.restype = None
    spans = (ctypes.c_int64(count - tail), ctypes.c_int64(count))
    places = (ctypes.byref(tensor), ctypes.byref(numbers(CONSTANTS)))
    library.llmctl_cpu_adamw(dtypes(torch.float32, None), *places, *spans, 0)
    check_errors([whole[-tail:] for whole in given], usual, right)


@pytest.mark.cpu_only
def test_cuda_beyond_32_bit_indices(emulated_cuda: EmulatedCuda):
    tensor, given, tail, usual, right = many_elements()
    constants = ctypes.byref(numbers(CONSTANTS))
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call("llmctl_cuda_adamw", dtypes(torch.float32, None), ctypes.byref(tensor), 1, constants, None)
    check_errors([whole[-tail:] for whole in given], usual, right)
    assert not given[0][: 1 << 10].any()


@pytest.mark.cpu_only
@pytest.mark.parametrize("copy", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize(("sizes", "grad", "offset"), placed([(1,), (123, 0, 8195), (3,) * 130], LOW))
def test_cuda_touches_nothing_beside_its_tensors(emulated_cuda: EmulatedCuda, sizes, grad, moments, copy, offset):
    given = arguments(sizes, grad, copy, moments)
    lists = [[guarded(tensor, offset=offset) for tensor in tensors] for tensors in given[:5]]
    tensors = (AdamWTensor * len(sizes))()
    for number, size in enumerate(sizes):
        tensors[number].numel = size
        for name, tensors_of_kind in zip(("master", "grad", "exp_avg", "exp_avg_sq", "copy"), lists, strict=True):
            if tensors_of_kind:
                setattr(tensors[number], name, tensors_of_kind[number].data_ptr())
    constants = ctypes.byref(numbers(CONSTANTS))
    emulated_cuda.call("llmctl_cuda_adamw", dtypes(grad, copy, *moments), tensors, len(sizes), constants, None)
    found = [tensor for tensors_of_kind in lists for tensor in tensors_of_kind]
    usual, *_ = run(ADAMW.implementations["reference"].function, given)
    right, *_ = run(ADAMW.implementations["reference"].function, in_float64(given))
    check_errors(found, usual, right)


OWN_DIVISORS = [(7.3, 7.3), (1.0, 1.0), (float("nan"), None), (float("inf"), None)]
"""A divisor on the device, and that of the host with the same result; None: nothing changes."""


@pytest.mark.parametrize(("own", "usual"), OWN_DIVISORS)
@pytest.mark.parametrize("copy", [None, torch.bfloat16])
@pytest.mark.parametrize("moments", [MOMENTS[0], MOMENTS[-1]], ids=str)
@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_the_divisor_may_be_on_the_device(backend, moments, copy, own, usual):
    step = ADAMW.implementations[backend].function
    given = arguments((37, 8195), torch.float32, copy, moments)
    # As in training, the copies are the masters rounded: torch's way writes them again.
    given[4][:] = [master.to(copy) for master in given[0]] if copy is not None else []
    expected = [] if usual is None else run(step, (*given[:5], replace(CONSTANTS, divisor=usual)))[0]
    expected = expected or [tensor for tensors in given[:5] for tensor in tensors]
    divisor = torch.tensor(own, dtype=torch.float64)
    found = run(step, (*given[:5], replace(CONSTANTS, divisor=divisor)))[0]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.cpu_only
@pytest.mark.parametrize(("own", "usual"), OWN_DIVISORS)
def test_cuda_reads_the_divisor_from_its_memory(emulated_cuda: EmulatedCuda, own, usual):
    def stepped(constants: AdamWConstants, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        lists = arguments((8195,), torch.float32, torch.bfloat16)[:5]
        tensor = AdamWTensor(*(tensors[0].data_ptr() for tensors in lists), 8195)
        place = None if divisor is None else ctypes.c_void_p(divisor.data_ptr())
        places = (ctypes.byref(tensor), 1, ctypes.byref(numbers(constants)), place)
        emulated_cuda.call("llmctl_cuda_adamw", dtypes(torch.float32, torch.bfloat16), *places)
        return [tensors[0] for tensors in lists]

    given = [tensors[0] for tensors in arguments((8195,), torch.float32, torch.bfloat16)[:5]]
    expected = given if usual is None else stepped(replace(CONSTANTS, divisor=usual), None)
    found = stepped(CONSTANTS, torch.tensor(own, dtype=torch.float64))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("wrong", [torch.tensor(7.0), torch.ones(2, dtype=torch.float64)], ids=["dtype", "size"])
def test_a_divisor_that_is_not_one_number_of_double_precision(wrong):
    with pytest.raises(RuntimeError, match="own_divisor is not one float64 number"):
        ADAMW.implementations["native"].function(
            *arguments((5,), torch.float32, None)[:5], replace(CONSTANTS, divisor=wrong)
        )
