"""docs/dev/add-a-op.md, followed for an op in plain torch: the squared ReLU."""

import pytest

from tests.recipes.copied_tree import GATES, PROOF_S, CopiedTree, narrowed, proof_of

OPS = "tests/trainer/ops"
OP = '''"""Squared ReLU, element by element.

Legend: F any dims.
So et al. 2021 (arXiv:2109.08668), section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.ops.operation import Implementation, Operation

SquaredRelu = Callable[[torch.Tensor], torch.Tensor]
"""(inner [F]) -> [F]."""


def _reference(inner: torch.Tensor) -> torch.Tensor:
    """[F] -> [F]."""
    return torch.relu(inner).square()


def _example(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    return (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(),)


SQUARED_RELU: Operation[SquaredRelu] = Operation(
    "squared_relu",
    {"reference": Implementation(_reference)},
    [partial(_example, shape) for shape in ((3, 17), (4, 2, 1024))],
)
'''
TEST = '''"""The squared ReLU against its definition."""

import torch

from tests.trainer.ops.op_checks import check_gradients, drawn
from trainer.config.sections.model import ModelConfig
from trainer.model.mlp import FeedForwardActivation
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.squared_relu import SQUARED_RELU

REFERENCE = SQUARED_RELU.implementations["reference"].function


def test_values_are_those_of_the_definition():
    inner = drawn((5, 123), torch.float64)
    assert torch.equal(REFERENCE(inner), torch.where(inner > 0.0, inner * inner, 0.0))


def test_gradients_are_those_of_finite_differences():
    check_gradients(REFERENCE, (drawn((3, 7), torch.float64).requires_grad_(),))


def test_the_layer_calls_the_op():
    calls = []
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, squared_relu=True)
    layer = FeedForwardActivation(model, Kernels(squared_relu=calls.append), torch.device("cpu"))
    layer(torch.ones(2))
    assert len(calls) == 1
'''


@pytest.fixture
def with_op(tree: CopiedTree) -> CopiedTree:
    """The copy after the steps of the page up to "Stop here"."""
    tree.write("trainer/ops/squared_relu.py", OP)
    tree.add_after(
        "trainer/planning/kernel_choice.py",
        '    "l2_norm": Row("tensor_lists"),',
        '    "squared_relu": Row("squared_relu", lambda config: config.model.activation == "squared_relu"),',
    )
    mlp = "trainer/model/mlp.py"
    tree.add_after(
        mlp,
        "from trainer.ops.operation import BySize",
        "from trainer.ops.squared_relu import SQUARED_RELU",
    )
    tree.add_after(
        mlp,
        "        if self._limits is None:",
        '            if self._kind == "squared_relu" and bias is row_weight is None and not self._gated:\n'
        "                return self._kernels[SQUARED_RELU](inner)",
    )
    tree.add_after("tests/test_rooms.py", '        "attention": {"build"},', '        "squared_relu": {"operation"},')
    tree.write("tests/trainer/ops/test_squared_relu.py", TEST)
    return tree


def test_an_op_in_plain_torch_passes_its_proof_and_the_gates(with_op: CopiedTree) -> None:
    with_op.check_format()
    tests = proof_of("add-a-op", NAME="squared_relu")[0]
    gates = f"tests/test_rooms.py {OPS}/dispatch/test_selection.py {OPS}/tools/test_kernel_benchmark.py"
    # The compiler of torch takes as long as all the rest: the test of all ops runs it.
    of_all = "every_operation_of_the_table or every_operation_is_measured or every_kernel"
    names = f"(squared_relu and not one_graph) or {of_all} or (rooms_import and trainer) or every_arrow or too_many"
    with_op.run(narrowed(f"{tests} {gates}", names))


@pytest.mark.proof
@pytest.mark.timeout(PROOF_S)
def test_an_op_in_plain_torch_passes_the_tests_of_all_ops(with_op: CopiedTree) -> None:
    with_op.prove(
        f"{GATES} {OPS}/test_squared_relu.py {OPS}/test_operations.py {OPS}/dispatch "
        f"{OPS}/tools/test_kernel_benchmark.py"
    )
    for command in proof_of("add-a-op", NAME="rms_norm"):
        with_op.run(command, limit_s=PROOF_S)
