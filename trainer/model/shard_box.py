"""Shard boxes: rectangular parts of a global tensor that make up a rank's shard. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """Shard box: a rectangular part of a global tensor that one rank holds.

    A box is contiguous and row-major in the rank's flattened shard.

    Attributes:
        offset: first index in each dim of the global tensor.
        shape: extent in each dim.
        start: position of the box's first element in the rank's flattened shard.
        is_owned: no rank with lower tp or pp rank also holds this box. Over the ranks of one replica every element
            of the model is owned exactly once.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    is_owned: bool

    @property
    def stop(self) -> int:
        """Position after the box's last element in the rank's flattened shard."""
        return self.start + math.prod(self.shape)
