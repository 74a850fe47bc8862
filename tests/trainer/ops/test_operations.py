"""Tests of all operations: examples reach every kernel, schemas, autograd's rules."""

import ctypes

import pytest
import torch
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils.checkpoint import checkpoint

from tests.trainer.ops.cuda.cuda_emulation.emulation import registered_kernels
from tests.trainer.ops.op_checks import (
    check_against_oracle,
    drawn,
    in_float64,
    mapped,
    run,
    tensors_of,
)
from trainer.ops.activation import ACTIVATION
from trainer.ops.adamw import ADAMW
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.dispatch.self_test import self_test
from trainer.ops.rms_norm import RMS_NORM
from trainer.ops.rotary import ROPE
from trainer.ops.tensor_lists import L2_NORM

pytestmark = pytest.mark.usefixtures("kernel_library")

# Operation -> CUDA kernels that a step of training launches for it.
KERNELS = {
    "rms_norm": ("rms_norm", "rms_norm_backward", "column_sums"),
    "add_rms_norm": ("rms_norm", "rms_norm_backward", "column_sums"),
    "activation": (
        *(
            f"{name}{direction}"
            for name in ("activation", "gated_activation")
            for direction in ("", "_with_bias", "_backward", "_with_bias_backward")
        ),
        *("activation_by_element", "activation_by_element_backward", "column_sums"),
    ),
    "rope": ("rope",),
    "adamw": ("adamw",),
    "l2_norm": ("sum_of_squares", "sum_of_partials"),
    "bias_dropout_add": ("bias_dropout_add",),
    "moe_permute": ("moe_combine",),
    "moe_unpermute": ("moe_combine", "moe_combine_backward"),
    "cross_entropy": ("cross_entropy_stats", "cross_entropy_grad"),
    "scaled_masked_softmax": ("scaled_masked_softmax", "scaled_softmax_backward"),
    "scaled_causal_softmax": ("scaled_causal_softmax", "scaled_softmax_backward"),
}


NATIVE = [operation for operation in OPERATIONS if "native" in operation.implementations]


@pytest.fixture(params=OPERATIONS, ids=lambda operation: operation.name)
def operation(request):
    return request.param


@pytest.fixture(params=NATIVE, ids=lambda operation: operation.name)
def native_operation(request):
    return request.param


def example(operation, number=0, dtype=torch.float32):
    where = torch.get_default_device()
    # On a GPU it is torch's default device, which would not take the generator.
    with torch.device("cpu"):
        return operation.examples[number](where, dtype, torch.Generator("cpu").manual_seed(1))


def launched():
    """Kernels launched on the emulated GPU since the last call; None without emulation."""
    # Tests that launch kernels directly may load the emulation without the emulated ops.
    if not any("emulated_ops" in path for path in torch.ops.loaded_libraries):
        return None
    emulation = ctypes.CDLL(None)
    emulation.emulation_launched.restype = ctypes.c_char_p
    return set(emulation.emulation_launched().decode().split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_kernels_pass_their_self_tests(native_operation, dtype):
    """The examples reach every kernel of training."""
    operation = native_operation
    own, device = operation.implementations["native"], torch.get_default_device()
    is_emulated = launched() is not None
    if dtype not in own.dtypes or device.type not in own.devices or (is_emulated and operation.name not in KERNELS):
        pytest.skip("there is no such kernel")
    assert self_test(operation, "native", device, dtype) is None
    if is_emulated:
        # Kernels of the gradients' dtype: gradients are accumulated in float32.
        suffix = "float32" if operation is ADAMW else str(dtype).removeprefix("torch.")
        names = {name if name == "sum_of_partials" else f"{name}_{suffix}" for name in KERNELS[operation.name]}
        assert not names - launched()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arguments_may_have_any_layout(native_operation, dtype, layout):
    """Lists have no gaps, but any alignment."""
    own = native_operation.implementations["native"]
    is_missing = dtype not in own.dtypes or (launched() is not None and native_operation.name not in KERNELS)
    if is_missing or (native_operation in (ADAMW, L2_NORM) and layout not in ("contiguous", "unaligned")):
        pytest.skip("there is no such kernel")
    if native_operation.name.endswith("softmax") and layout == "expanded gradients":
        pytest.skip("equal gradients cancel: test_softmax.py has them")
    for number in range(len(native_operation.examples)):
        check_against_oracle(
            native_operation, "native", example(native_operation, number, dtype), layout=layout, consumes=True
        )


def test_every_kernel_belongs_to_an_operation():
    assert registered_kernels().keys() == {name for names in KERNELS.values() for name in names}
    assert KERNELS.keys() == {one.name for one in NATIVE if "cuda" in one.implementations["native"].devices}


BACKENDS = [
    pytest.param(operation, backend, id=f"{operation.name}-{backend}")
    for operation in OPERATIONS
    for backend in operation.implementations
    if any(value.requires_grad for value in tensors_of(example(operation)))
]


def slopes(function, arguments, leaves, *, is_differentiated):
    """Gradients of the sum of all results, with the squares of ``leaves`` as arguments."""
    squares = iter([leaf * leaf for leaf in leaves])
    given = mapped(lambda value: next(squares) if value.requires_grad else value.clone(), arguments)
    results = [result.sum() for result in tensors_of(function(*given)) if result.requires_grad]
    return torch.autograd.grad(sum(results), leaves, create_graph=is_differentiated)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("operation", "backend"), BACKENDS)
def test_second_derivatives_are_right_or_refused(operation, backend):
    """This includes constant incoming gradients, with only saved tensors depending on the leaves."""
    function, arguments = operation.implementations[backend].function, in_float64(example(operation))
    leaves = [value.detach().requires_grad_() for value in tensors_of(arguments) if value.requires_grad]
    towards, along = (
        [drawn(leaf.shape, torch.float64, seed=seed + number) for number, leaf in enumerate(leaves)] for seed in (3, 50)
    )

    def along_of(found):
        return sum((one * other).sum() for one, other in zip(found, along, strict=True))

    first = slopes(function, arguments, leaves, is_differentiated=True)
    try:
        second = torch.autograd.grad(along_of(first), leaves)
    except RuntimeError as error:
        assert "cannot be differentiated twice" in str(error)
        return
    found = sum((one * other).sum() for one, other in zip(second, towards, strict=True))
    ends = []
    for step in (1e-5, -1e-5):
        moved = [(leaf + step * one).detach().requires_grad_() for leaf, one in zip(leaves, towards, strict=True)]
        ends.append(along_of(slopes(function, arguments, moved, is_differentiated=False)))
    torch.testing.assert_close(found, (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-7)


@pytest.mark.cpu_only
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_first_derivatives_in_a_checkpoint_may_be_part_of_a_graph(backend):
    """A checkpoint unpacks saved tensors only once."""
    function = RMS_NORM.implementations[backend].function
    hidden, weight, epsilon = in_float64(example(RMS_NORM))
    leaf = hidden.detach().requires_grad_()

    def slope(output):
        return torch.autograd.grad(output.square().sum(), leaf, create_graph=True)[0]

    found = slope(checkpoint(function, leaf, weight, epsilon, use_reentrant=False))
    assert found.requires_grad
    assert torch.equal(found, slope(function(leaf, weight, epsilon)))


@pytest.mark.cpu_only
def test_changed_arguments_are_reported_to_autograd(native_operation):
    """Otherwise a backward that saved the argument would silently read changed values."""
    operation, has_changed = native_operation, False
    for number in range(len(operation.examples)):
        arguments = mapped(lambda value: value.detach().clone(), example(operation, number))
        before = [(value.clone(), value._version) for value in tensors_of(arguments)]
        operation.implementations["native"].function(*arguments)
        for value, (old, version) in zip(tensors_of(arguments), before, strict=True):
            if not torch.equal(value, old):
                has_changed = True
                assert value._version > version
    assert has_changed is (operation.name in ("adamw", "rope", "cross_entropy"))


@pytest.mark.cpu_only
def test_schemas_name_what_is_changed_and_what_shares_memory(native_operation):
    """Of the ops of forward and backward; otherwise autograd and the caller would trust changed tensors."""
    for dtype in (torch.float32, torch.bfloat16):
        with SchemaCheckMode() as mode:
            run(native_operation.implementations["native"].function, example(native_operation, dtype=dtype))
        assert [name for name in mode.ops if name.startswith("llmctl::")]


@pytest.mark.cpu_only
def test_rows_without_channels():
    norm, rope = RMS_NORM.implementations["native"].function, ROPE.implementations["native"].function
    hidden, weight = (drawn(shape, torch.float32).requires_grad_() for shape in ((3, 0), (0,)))
    for function, given in (
        (norm, (hidden, weight, 1e-5)),
        (rope, (drawn((4, 2, 0), torch.float32), 1, 8, None, None)),
    ):
        assert not any(result.numel() for result in run(function, given)[0])


def test_rows_without_channels_have_weights():
    inner, weights = (drawn(shape, torch.float32).requires_grad_() for shape in ((3, 0), (3,)))
    activated = ACTIVATION.implementations["native"].function(inner, None, weights, "silu", True)
    assert activated.shape == (3, 0)
    assert not torch.autograd.grad(activated.sum(), weights)[0].any()
