"""The table of rotary position embedding; trainer.ops.rotary rotates heads by its angles.

Legend: S sequence, B micro-batch. Su et al. 2021 (arXiv:2104.09864), equation 34.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of the rotation angles, each [S, 1, 1, 1, rotated/2].

    [S, B, 1, 1, rotated/2] if each sample has its own positions.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, length: int, rotated: int, base: float, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """The table of ``length`` positions for the first ``rotated`` channels of each head.

        The angles are float64 products, rounded to ``dtype`` at the end.
        """
        channel = torch.arange(0, rotated, 2, dtype=torch.float64)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), base ** (-channel / rotated))
        angles = angles.view(length, 1, 1, 1, rotated // 2)
        return cls(angles.cos().to(device, dtype), angles.sin().to(device, dtype))

    def first(self, length: int) -> RotaryTable:
        """The table of the first ``length`` positions (views).

        Raises:
            ValueError: the table has fewer positions.
        """
        if length > len(self.cos):
            raise ValueError(f"a sequence of {length} exceeds the {len(self.cos)} positions of the rotary table")
        return RotaryTable(self.cos[:length], self.sin[:length])

    def at(self, positions: torch.Tensor) -> RotaryTable:
        """The table of ``positions`` [S, B], all of which must lie in this table."""
        return RotaryTable(self.cos[positions].squeeze(2), self.sin[positions].squeeze(2))
