"""The residual stream between layers, whose last sum is left to the norm that reads it.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Residual(NamedTuple):
    """The sum of two tensors [S(/t), B, H], not made yet: a norm adds them up in its own pass over memory.

    Attributes:
        hidden: the stream before the last part of the last layer.
        part: what that part adds to it; None: nothing.
    """

    hidden: torch.Tensor
    part: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """The sum."""
        return self.hidden if self.part is None else self.hidden + self.part
