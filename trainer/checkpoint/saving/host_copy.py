"""Copies of a staged save in host memory, so that the next steps may change the state while it is written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.checkpoint.saving.snapshot import Snapshot
from trainer.optimizer.split_master import Master

if TYPE_CHECKING:
    from trainer.checkpoint.saving.staging import StagedSave

_ALIGNMENT = 64
"""Each copy begins at a multiple of a cache line."""


def copied_bytes(staged: StagedSave) -> int:
    """Host memory that a copy of ``staged`` takes on this rank, in bytes."""
    tensors = (tensor for named in staged.files.values() for tensor in named.values())
    return sum(_padded(tensor) for tensor in tensors)


def _padded(tensor: Master) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT


class HostCopy:
    """Host memory for one staged save, reused from save to save. It never grows after the first one.

    With CUDA its pages are locked, so that the GPU copies at full speed. They are registered, not allocated by torch,
    which would round the size up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        """Hold no memory yet. ``device``: of the state."""
        self._device = device
        # One for all saves: memory of a stream, in which split masters are joined, is kept for that stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Take ``size`` bytes now, and touch them: memory that is missing is missed before the first step.

        Raises:
            RuntimeError: the system does not give the memory.
        """
        if self._memory.numel() >= size:
            return
        self._memory = torch.zeros(size, dtype=torch.uint8)
        # Zeros come untouched from the system.
        self._memory.fill_(1)
        if self._device.type == "cuda":
            # A refusal, by a limit on locked memory, only makes the copies slower.
            torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                self._memory.data_ptr(), size, 0
            )

    def take(self, staged: StagedSave) -> StagedSave:
        """The same save with copies of all its tensors, which its snapshot makes. They are valid until the next call.

        Raises:
            RuntimeError: the system does not give the memory.
        """
        places = self._places(staged)
        pairs = [(tensor, places[file][key]) for file, named in staged.files.items() for key, tensor in named.items()]
        return replace(staged, files=places, snapshot=Snapshot(pairs, self._stream))

    def places(self, staged: StagedSave) -> StagedSave:
        """The same save with the tensors of this memory that a snapshot fills: views, with the values that are there.

        Raises:
            RuntimeError: the system does not give the memory.
        """
        return replace(staged, files=self._places(staged))

    def _places(self, staged: StagedSave) -> dict[str, dict[str, Tensor]]:
        self.reserve(copied_bytes(staged))
        files: dict[str, dict[str, Tensor]] = {}
        begin = 0
        for file, tensors in staged.files.items():
            for key, tensor in tensors.items():
                stop = begin + tensor.numel() * tensor.element_size()
                files.setdefault(file, {})[key] = self._memory[begin:stop].view(tensor.dtype).view(tensor.shape)
                begin += _padded(tensor)
        return files

    def content(self, size: int) -> Tensor:
        """The first ``size`` bytes, which ``reserve`` has taken: a view, 1-D uint8."""
        return self._memory[:size]
