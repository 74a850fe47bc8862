"""What the Triton kernels must pass, in Triton's interpreter: numpy in the place of a GPU, on tensors of the CPU.

On a GPU test_gpu_kernels.py runs them too, by its plugin.
Triton reads TRITON_INTERPRET when it is imported, so that these run in a process of their own, which
test_triton_kernels.py starts:

    TRITON_INTERPRET=1 python -m pytest tests/trainer/kernels/triton_checks.py

The interpreter computes in the dtypes of a GPU. It shows that numbers are right, not that a compiler keeps them so.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.trainer.kernels import test_activation, test_cross_entropy, test_rms_norm, test_rotary
from tests.trainer.kernels.op_checks import (
    DTYPES,
    SHAPES,
    check_against_oracle,
    check_compiled,
    check_gradients,
    check_registration,
    check_same_bits,
    drawn,
    run,
    sparse_tensor,
)
from trainer.kernels.activation import ACTIVATION
from trainer.kernels.cross_entropy import CROSS_ENTROPY
from trainer.kernels.operation import Operation
from trainer.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from trainer.kernels.rotary import ROPE
from trainer.kernels.self_test import self_test

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret and not torch.cuda.is_available(), reason="runs with TRITON_INTERPRET=1"
)

# Each token and group of heads is a program of its own, which takes the interpreter milliseconds.
FEW_HEADS = [(2, 2, 3, 1, 16, 16, False), (2, 2, 2, 2, 16, 16, True), (3, 2, 1, 4, 43, 18, True)]
OPERATIONS = [RMS_NORM, ADD_RMS_NORM, ACTIVATION, CROSS_ENTROPY, ROPE]


def name(operation: Operation) -> str:
    return operation.name


def launching_ops():
    """Torch's ops that launch the kernels: there once their modules are imported."""
    from trainer.kernels.triton import activation, cross_entropy, rms_norm, rotary

    del activation, cross_entropy, rms_norm, rotary
    return torch.ops.llmctl_triton


def with_others(cases, typical):
    """Every case in float32, and a typical one in the other dtypes."""
    return [*((case, torch.float32) for case in cases), *((typical, dtype) for dtype in DTYPES[1:])]


@pytest.fixture(params=[RMS_NORM, ADD_RMS_NORM], ids=name)
def norm(request):
    return request.param


@pytest.mark.parametrize("operation", OPERATIONS, ids=name)
def test_it_passes_its_self_test(operation):
    device = torch.get_default_device()
    # Examples are drawn on the CPU.
    with torch.device("cpu"):
        assert self_test(operation, "triton", device, torch.bfloat16) is None


@pytest.mark.parametrize("operation", OPERATIONS, ids=name)
def test_torch_compiles_it(operation):
    device = torch.get_default_device()
    with torch.device("cpu"):
        example = operation.examples[0](device, torch.float32, torch.Generator().manual_seed(1))
    check_compiled(operation.implementations["triton"].function, example, "aot_eager")


def test_torch_knows_what_the_ops_do():
    ops = launching_ops()
    hidden, residual, weight, scale = (drawn(shape, torch.float32) for shape in ((5, 33), (5, 33), (33,), (5,)))
    for other in (None, residual):
        check_registration(ops.rms_norm, (hidden, other, weight, 1e-5))
        check_registration(ops.rms_norm_backward, (residual, other, hidden, weight, scale))
    inner, bias, grads = (drawn(shape, torch.float32) for shape in ((5, 66), (66,), (5, 33)))
    for options in ((None, None, "gelu", True), (bias, scale, "silu", True)):
        check_registration(ops.activation, (inner, *options))
        check_registration(ops.activation_backward, (grads, inner, *options))
    labels = torch.tensor([0, 30, -100, 7, 29])
    for sums_logits in (False, True):
        check_registration(ops.cross_entropy_stats, (hidden, labels, 0, 31, 31, -100, sums_logits))
    check_registration(ops.cross_entropy_grad_, (hidden, labels, scale, scale, scale.exp(), 0, 31, 31, -100, 0.1, 0.1))
    heads, angles = drawn((4, 2, 3, 4, 8), torch.float32), drawn((4, 1, 1, 1, 3), torch.float32)
    query = drawn((4, 2, 6, 8), torch.float32)
    check_registration(ops.rope_split, (heads, query, angles, angles, False))
    check_registration(ops.rope_split, (heads[..., :3, :].clone(), None, angles, angles, True))
    grads = [drawn((2, count, 4, 8), torch.float32) for count in (6, 3, 3)]
    check_registration(ops.rope_join, (*grads, angles, angles, False))


@pytest.mark.parametrize(("shape", "dtype"), with_others(SHAPES, (5, 123)), ids=str)
def test_norms(norm, shape, dtype):
    given = test_rms_norm.arguments(norm, shape, dtype)
    check_against_oracle(norm, "triton", given, oracle=test_rms_norm.ORACLES[norm.name])


def test_norms_of_any_layout(norm, layout):
    given = test_rms_norm.arguments(norm, (3, 7, 129), torch.float32)
    check_against_oracle(norm, "triton", given, layout=layout)


def test_norms_have_the_gradients_of_finite_differences(norm):
    given = test_rms_norm.arguments(norm, (3, 5), torch.float64)
    check_gradients(norm.implementations["triton"].function, given)


def test_norms_of_more_rows_than_programs_at_once(norm, monkeypatch):
    """Each program of backward takes several tiles of rows, the last one fewer."""
    from trainer.kernels.triton import rms_norm

    monkeypatch.setattr(rms_norm, "SUMMING_PROGRAMS", 3)
    check_against_oracle(norm, "triton", test_rms_norm.arguments(norm, (75, 300), torch.float32))


def test_norms_of_rows_too_wide_for_a_program_are_eager():
    from trainer.kernels.triton.rms_norm import WIDEST

    given = test_rms_norm.arguments(ADD_RMS_NORM, (2, WIDEST + 1), torch.float32)
    found, usual = (run(ADD_RMS_NORM.implementations[backend].function, given)[0] for backend in ("triton", "eager"))
    check_same_bits(found, usual)
    check_against_oracle(RMS_NORM, "triton", test_rms_norm.arguments(RMS_NORM, (2, 40000), torch.float32))


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_or_its_norm_may_lead_nowhere(used):
    values = test_rms_norm.arguments(ADD_RMS_NORM, (5, 33), torch.float64)
    found, expected = (
        torch.autograd.grad(
            ADD_RMS_NORM.implementations[backend].function(*values)[used].square().sum(), values[:3], allow_unused=True
        )
        for backend in ("triton", "eager")
    )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("form", "dtype"), with_others(test_activation.FORMS, ("gelu_tanh", True)), ids=str)
def test_activations(form, dtype):
    kind, gated = form
    given = test_activation.arguments((5, 1123), dtype, kind, gated)
    # In float64 the oracle is eager, which rounds too: its tanh form of GeLU subtracts where this one does not.
    check_against_oracle(ACTIVATION, "triton", given, slack=32.0 if dtype is torch.float64 else 4.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activations_of_every_shape(shape):
    check_against_oracle(ACTIVATION, "triton", test_activation.arguments(shape, torch.float32))


@pytest.mark.parametrize(("bias", "row_weight"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("kind", "gated"), test_activation.FORMS)
def test_activations_without_bias_or_weights(kind, gated, bias, row_weight):
    given = test_activation.arguments((7, 64), torch.float32, kind, gated, bias=bias, row_weight=row_weight)
    check_against_oracle(ACTIVATION, "triton", given)


@pytest.mark.parametrize("gated", [True, False])
def test_activations_of_any_layout(gated, layout):
    given = test_activation.arguments((4, 3, 45), torch.float32, "gelu", gated)
    check_against_oracle(ACTIVATION, "triton", given, layout=layout)


@pytest.mark.parametrize(("kind", "gated"), test_activation.FORMS)
def test_activations_have_the_gradients_of_finite_differences(kind, gated):
    given = test_activation.arguments((2, 3), torch.float64, kind, gated)
    check_gradients(ACTIVATION.implementations["triton"].function, given)


@pytest.mark.parametrize("gated", [True, False])
def test_activations_of_more_rows_than_programs_at_once(gated, monkeypatch):
    from trainer.kernels.triton import activation

    monkeypatch.setattr(activation, "SUMMING_PROGRAMS", 1)
    check_against_oracle(ACTIVATION, "triton", test_activation.arguments((21, 1030), torch.float32, gated=gated))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_far_out_are_flat(kind):
    far = torch.tensor([[-1e30, -1e3, 0.0, 1e3, 1e30]], requires_grad=True)
    activated = ACTIVATION.implementations["triton"].function(far, torch.zeros(5), None, kind, False)
    (grad,) = torch.autograd.grad(activated.sum(), far)
    assert activated.tolist() == [[0.0, 0.0, 0.0, 1e3, far[0, 4].item()]]
    assert grad.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]]


@pytest.mark.parametrize("terms", ["plain", "all"])
@pytest.mark.parametrize(("size", "dtype"), with_others(test_cross_entropy.SHAPES, ((37, 1000), 999)), ids=str)
def test_losses(size, terms, dtype):
    shape, num_valid = size
    given = test_cross_entropy.arguments(shape, num_valid, dtype, test_cross_entropy.TERMS[terms])
    check_against_oracle(CROSS_ENTROPY, "triton", given, oracle=test_cross_entropy.formula, consumes=True)


def test_losses_of_any_layout(layout):
    given = test_cross_entropy.arguments((3, 7, 129), 129, torch.float32, test_cross_entropy.EVERYTHING)
    check_against_oracle(
        CROSS_ENTROPY, "triton", given, layout=layout, oracle=test_cross_entropy.formula, consumes=True
    )


@pytest.mark.parametrize("terms", test_cross_entropy.TERMS)
def test_losses_have_the_gradients_of_finite_differences(terms):
    test_cross_entropy.test_gradients_are_those_of_finite_differences(terms, "triton")


@pytest.mark.parametrize(
    ("vocab_size", "padded", "dtype"),
    [(61, 64, torch.bfloat16), (5, 64, torch.float32), (1, 4, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_divided_vocabulary_has_the_loss_of_the_whole(parts, vocab_size, padded, dtype):
    test_cross_entropy.test_a_divided_vocabulary_has_the_loss_of_the_whole(
        parts, vocab_size, padded, "all", dtype, "triton"
    )


@pytest.mark.parametrize("parts", [1, 4])
def test_huge_and_infinite_logits(parts, monkeypatch):
    from trainer.kernels.triton import cross_entropy

    # Several blocks of columns: maxima that follow one another, blocks of nothing but -inf.
    monkeypatch.setattr(cross_entropy, "_WIDEST", 4)
    test_cross_entropy.test_huge_logits(parts, "triton")
    for dtype in (torch.float32, torch.float64):
        test_cross_entropy.test_infinitely_unlikely_columns(parts, dtype, "triton")
    for spoil in ("nan", "negative nan", "inf", "nothing but -inf"):
        test_cross_entropy.test_what_is_not_a_number_stays_none(spoil, parts, "triton")


def test_labels_outside_the_vocabulary_and_ignored_ones():
    test_cross_entropy.check_labels_outside_the_vocabulary("triton")
    logits = torch.full((3, 70), torch.nan)
    logits[1] = drawn((70,), torch.float32)
    logits.requires_grad_()
    columns = test_cross_entropy.VocabColumns(0, 70, 70)
    function = CROSS_ENTROPY.implementations["triton"].function
    losses = function(logits * 1, torch.tensor([-100, 3, 4]), columns, test_cross_entropy.PLAIN)
    losses.backward(torch.tensor([1.0, 1.0, 0.0]))
    assert losses[0] == 0.0 and losses[2].isnan()
    assert logits.grad is not None
    assert logits.grad.any(1).tolist() == [False, True, False]


def test_the_logits_become_their_gradient():
    test_cross_entropy.test_the_logits_become_their_gradient(torch.float32, "triton")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), with_others(test_rotary.SHAPES, FEW_HEADS[1]), ids=str)
def test_rotary_embedding(shape, interleaved, dtype):
    given = test_rotary.arguments(shape, dtype, interleaved=interleaved)
    check_against_oracle(ROPE, "triton", given, consumes=True)


@pytest.mark.parametrize("shape", FEW_HEADS, ids=str)
def test_rotary_embedding_of_any_layout(shape, layout):
    check_against_oracle(ROPE, "triton", test_rotary.arguments(shape, torch.float32), layout=layout, consumes=True)


@pytest.mark.parametrize("queries", [1, 3])
def test_heads_without_rotation(queries):
    given = test_rotary.arguments((4, 2, 3, queries, 9, 0, False), torch.float32, is_turned=False)
    check_against_oracle(ROPE, "triton", given, consumes=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 3, 2, True), (2, 1, 1, 2, 4, 4, False)], ids=str)
def test_rotary_embedding_has_the_gradients_of_finite_differences(shape, interleaved):
    given = test_rotary.arguments(shape, torch.float64, interleaved=interleaved)
    check_gradients(ROPE.implementations["triton"].function, given)


def test_many_heads_of_a_group_take_several_steps():
    check_against_oracle(
        ROPE, "triton", test_rotary.arguments((2, 1, 2, 9, 300, 256, False), torch.float32), consumes=True
    )


def test_one_query_per_group_is_turned_in_place():
    packed, *rest = test_rotary.arguments(test_rotary.SHAPES[1], torch.float32)
    memory = packed.detach()
    heads = ROPE.implementations["triton"].function(memory, *rest)
    assert {part.untyped_storage().data_ptr() for part in heads} == {memory.untyped_storage().data_ptr()}


@pytest.fixture
def last_programs(monkeypatch):
    """Of a launch only the last program runs, and only what it touches takes memory."""
    from triton.runtime import interpreter

    launches = interpreter.GridExecutor.__call__.__code__

    def last_of_launches(*bounds):
        found = range(*bounds)
        return found[-1:] if sys._getframe(1).f_code is launches else found

    monkeypatch.setattr(interpreter, "range", last_of_launches, raising=False)
    # Copies what is already there, all of it.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)


def ending_in(last, rows):
    """A tensor of so many rows, zeros but for the last."""
    whole = sparse_tensor((rows, *last.shape[1:]), last.dtype)
    whole[-1:] = last
    return whole


@pytest.mark.cpu_only
@pytest.mark.usefixtures("last_programs")
def test_norms_beyond_two_to_the_31_elements():
    from trainer.kernels.triton.rms_norm import SUMMING_PROGRAMS

    # The last row is one of the last program, forward and backward.
    rows, width = 249 * SUMMING_PROGRAMS, 1 << 15
    hidden, residual = (drawn((1, width), torch.bfloat16, seed=seed) for seed in (1, 2))
    weight, many = drawn((width,), torch.bfloat16), ending_in(hidden, rows)
    assert many.numel() > 1 << 31
    ops = launching_ops()
    found = ops.rms_norm(many, ending_in(residual, rows), weight, 1e-5)
    expected = ops.rms_norm(hidden, residual, weight, 1e-5)
    check_same_bits([one[-1:] for one in found], expected)
    scale = expected[2]
    gradient, _ = ops.rms_norm_backward(ending_in(residual, rows), None, many, weight, ending_in(scale, rows))
    check_same_bits([gradient[-1:]], ops.rms_norm_backward(residual, None, hidden, weight, scale)[:1])


@pytest.mark.cpu_only
@pytest.mark.usefixtures("last_programs")
def test_activations_beyond_two_to_the_31_elements():
    rows, width, columns = 2200, 1 << 19, slice(-1000, None)
    inner, grads = drawn((1, 2 * width), torch.bfloat16), drawn((1, width), torch.bfloat16, seed=1)
    many, form = ending_in(inner, rows), (None, None, "silu", True)
    ops = launching_ops()
    found, expected = (ops.activation(one, *form) for one in (many, inner))
    check_same_bits([found[-1, columns]], [expected[-1, columns]])
    found, expected = (
        ops.activation_backward(*tensors, *form)[0] for tensors in ((ending_in(grads, rows), many), (grads, inner))
    )
    check_same_bits([found[-1, columns]], [expected[-1, columns]])
    assert found[-1, columns].any()


@pytest.mark.cpu_only
@pytest.mark.usefixtures("last_programs")
def test_losses_beyond_two_to_the_31_elements():
    rows, width = (1 << 16) + 4, 1 << 15
    logits, label = drawn((1, width), torch.bfloat16), torch.tensor([width - 5])
    many, labels = ending_in(logits, rows), ending_in(label, rows)
    ops, where = launching_ops(), (0, width, width, -100)
    found, expected = (ops.cross_entropy_stats(*tensors, *where, True) for tensors in ((many, labels), (logits, label)))
    check_same_bits([one[..., -1:] for one in found], expected)
    maximum, sums = expected
    statistics, before = (torch.ones(1), maximum, sums[0]), logits.clone()
    ops.cross_entropy_grad_(many, labels, *(ending_in(one, rows) for one in statistics), *where, 0.1, 0.1)
    ops.cross_entropy_grad_(logits, label, *statistics, *where, 0.1, 0.1)
    # The last program has the last columns alone.
    check_same_bits([many[-1:]], [logits])
    assert not torch.equal(logits[:, -4096:], before[:, -4096:])


@pytest.mark.cpu_only
@pytest.mark.usefixtures("last_programs")
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_beyond_two_to_the_31_elements(interleaved):
    length, queries, width = (1 << 18) + 8, 62, 128
    heads, angles = (
        drawn((1, 1, 1, queries + 2, width), torch.bfloat16),
        drawn((1, 1, 1, 1, width // 2), torch.bfloat16),
    )
    many, tables = ending_in(heads, length), ending_in(angles, length)
    query, taken = (torch.empty((count, 1, queries, width), dtype=torch.bfloat16) for count in (length, 1))
    ops = launching_ops()
    ops.rope_split(many, query, tables, tables, interleaved)
    ops.rope_split(heads, taken, angles, angles, interleaved)
    check_same_bits([many[-1:], query[-1:]], [heads, taken])
    grads = [drawn((1, 1, count, width), torch.bfloat16, seed=count) for count in (queries, 1, 1)]
    found = ops.rope_join(*(ending_in(one, length).permute(1, 2, 0, 3) for one in grads), tables, tables, interleaved)
    expected = ops.rope_join(*(one.permute(1, 2, 0, 3) for one in grads), angles, angles, interleaved)
    check_same_bits([found[-1:]], [expected])
