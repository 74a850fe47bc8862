"""Benchmark cases of an operation: sizes, arguments, minimum bytes, plain torch version.

The byte counts are the minimum that forward or backward must read and write if the operation saves only its inputs, its
results and one number per row. Vectors of one row are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Size = tuple[int, ...]
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """One operation at one size, in one dtype, on one device.

    Attributes:
        arguments: arguments of the operation; differentiable tensors require a gradient.
        plain: the same computation on the same arguments as users write it in torch.
        forward_bytes: minimum bytes moved by a call.
        backward_bytes: minimum bytes moved by its backward; 0 without a backward.
    """

    arguments: tuple[Any, ...]
    plain: Callable[..., Any]
    forward_bytes: int
    backward_bytes: int = 0


@dataclass(frozen=True)
class Draw:
    """Source of the random tensors of a case.

    Attributes:
        device: device of the tensors.
        dtype: dtype of the activations.
        generator: random generator of ``device``.
    """

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensor drawn from the standard normal distribution."""
        made = torch.randn(shape, generator=self.generator, device=self.device)
        return made.to(dtype or self.dtype)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Leaf tensor drawn from the standard normal distribution, which requires a gradient."""
        return self.normal(*shape, dtype=dtype).requires_grad_()

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and statistics."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True)
class Bench:
    """Benchmark of an operation.

    Attributes:
        dims: names of the numbers of a size.
        sizes: large sizes first, then small sizes at which call overhead exceeds the time to move the bytes.
        build: function that makes the case of a size.
    """

    dims: str
    sizes: tuple[Size, ...]
    build: Callable[[Size, Draw], Case]


ROWS = ((4096, 4096), (64, 256))
"""Sizes, tokens x hidden, of operations on rows."""
