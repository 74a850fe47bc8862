"""Backward from a tensor with a given gradient, without torch's symbolic shapes.

torch.autograd.backward imports sympy, a second of CPU time in each rank, to compare the shape of a given gradient. A
scalar without a gradient needs no comparison.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SeededBackward:
    """The backward pass of ``output``, to run once; keeps its graph alive but not its memory."""

    def __init__(self, output: Tensor) -> None:
        self._gradients: list[Tensor] = []
        # An edge, because a tensor would keep its value.
        scalar = _Scalar.apply(output, self._gradients)  # type: ignore[no-untyped-call]
        self._edge = torch.autograd.graph.get_gradient_edge(scalar)

    def run(self, gradient: Tensor) -> None:
        """Accumulate the gradients of the leaves.

        Args:
            gradient: of the output, with its shape.
        """
        self._gradients.append(gradient)
        torch.autograd.backward(self._edge)


class _Scalar(torch.autograd.Function):
    """A scalar whose backward hands on the gradient that the list then holds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.pop(), None
