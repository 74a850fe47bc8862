"""Float32 masters that are kept as a bfloat16 weight and a remainder of 16 bits: see trainer.ops.master_halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trainer.ops.master_halves import join_master, split_master

# Elements that are joined at once: 64 MB of float32.
_PART = 1 << 24


@dataclass(frozen=True)
class SplitMaster:
    """A live float32 master without memory of its own; has those methods of a tensor that checkpoints need.

    Attributes:
        weight: bfloat16.
        remainder: int16, of the same shape and device.
    """

    weight: Tensor
    remainder: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of ``joined``."""
        return torch.float32

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        return self.remainder.shape

    @property
    def device(self) -> torch.device:
        """As of a tensor."""
        return self.remainder.device

    def numel(self) -> int:
        """As of a tensor."""
        return self.remainder.numel()

    def element_size(self) -> int:
        """Bytes of an element of ``joined``."""
        return 4

    def __getitem__(self, part: slice) -> SplitMaster:
        """A view of some rows."""
        return self._of_both(lambda half: half[part])

    def view(self, shape: Sequence[int]) -> SplitMaster:
        """A view of another shape."""
        return self._of_both(lambda half: half.view(tuple(shape)))

    def narrow(self, dim: int, start: int, length: int) -> SplitMaster:
        """A view of ``length`` indices of a dim."""
        return self._of_both(lambda half: half.narrow(dim, start, length))

    def detach(self) -> SplitMaster:
        """A view without autograd."""
        return self._of_both(Tensor.detach)

    def zero_(self) -> None:
        """Set the master to zeros."""
        self.weight.zero_()
        self.remainder.zero_()

    def copy_(self, master: Tensor) -> None:
        """Set the master to numbers of any dtype and device."""
        split_master(master.to(self.device, torch.float32, copy=True), self.weight, self.remainder)

    def joined(self) -> Tensor:
        """The master, in new memory."""
        return join_master(self.weight, self.remainder)

    def parts(self) -> Iterator[Tensor]:
        """The master, flattened and in parts, each in new memory."""
        flat = self.view([-1])
        for start in range(0, self.numel(), _PART):
            yield flat[start : start + _PART].joined()

    def copy_to(self, target: Tensor) -> None:
        """Copy the master into a contiguous float32 tensor on any device, without waiting for the copies."""
        flat, start = target.view(-1), 0
        for part in self.parts():
            flat[start : start + part.numel()].copy_(part, non_blocking=True)
            start += part.numel()

    def _of_both(self, view: Callable[[Tensor], Tensor]) -> SplitMaster:
        return SplitMaster(view(self.weight), view(self.remainder))


Master = Tensor | SplitMaster
"""A live float32 master. Where all kinds of an optimizer's state are meant, also a moment."""

Own = TypeVar("Own", Tensor, SplitMaster, Master)


def joined(master: Master) -> Tensor:
    """The master as a tensor: itself, or in new memory."""
    return master.joined() if isinstance(master, SplitMaster) else master
