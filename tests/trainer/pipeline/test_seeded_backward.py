"""SeededBackward gives the gradients of torch.autograd.backward, keeps no output, and imports no sympy."""

import subprocess
import sys
import weakref

import pytest
import torch

from trainer.pipeline.seeded_backward import SeededBackward

FIRST_BACKWARD = """
import sys, torch
from trainer.pipeline.seeded_backward import SeededBackward
leaf = torch.ones(3, requires_grad=True)
SeededBackward(leaf * 2).run(torch.ones(3))
assert leaf.grad.tolist() == [2.0] * 3
sys.exit("sympy" in sys.modules)
"""


@pytest.mark.parametrize("shape", [(), (2,), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_gradients_are_those_of_autograd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
    # Of the loss in another dtype, as the factors of the loss are.
    gradient = torch.randn(shape, dtype=torch.float32)
    (expected,) = torch.autograd.grad(leaf.sin(), leaf, gradient)
    backward = SeededBackward(leaf.sin())
    assert leaf.grad is None
    backward.run(gradient)
    assert leaf.grad is not None and torch.equal(leaf.grad, expected)


def test_the_output_is_free_before_the_backward() -> None:
    leaf = torch.randn(4, requires_grad=True)
    output = leaf + 1
    memory, backward = weakref.ref(output), SeededBackward(output)
    del output
    assert memory() is None
    backward.run(torch.ones(4))


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        SeededBackward(torch.ones(3, requires_grad=True) * 2).run(torch.ones(4))


def test_the_first_backward_of_a_process_imports_no_sympy() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
