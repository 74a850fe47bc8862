"""How an operation is measured: sizes, arguments, the bytes that it must move, and the same as users write it.

Bytes are those that must be read or written at the least, forward or backward, by an operation that keeps
nothing in between but its inputs, its results and a number per row; vectors of one row are not counted.
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
        arguments: as the operation takes them; what has a gradient requires it.
        plain: the same from the same arguments, in the operations of torch that come to mind.
        forward_bytes: what a call must move at the least.
        backward_bytes: what its backward must; 0 where there is none.
    """

    arguments: tuple[Any, ...]
    plain: Callable[..., Any]
    forward_bytes: int
    backward_bytes: int = 0


@dataclass(frozen=True)
class Draw:
    """Where the numbers of a case come from.

    Attributes:
        device: of the tensors.
        dtype: of the activations.
        generator: of that device.
    """

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Drawn from the standard normal distribution."""
        made = torch.randn(shape, generator=self.generator, device=self.device)
        return made.to(dtype or self.dtype)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The same, with a gradient."""
        return self.normal(*shape, dtype=dtype).requires_grad_()

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and statistics."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True)
class Bench:
    """How an operation is measured.

    Attributes:
        dims: what the numbers of a size are.
        sizes: large ones first; then small ones, at which calls cost more than bytes.
        build: the case of a size.
    """

    dims: str
    sizes: tuple[Size, ...]
    build: Callable[[Size, Draw], Case]


ROWS = ((4096, 4096), (64, 256))
"""Tokens x hidden: sizes of what works on rows."""
