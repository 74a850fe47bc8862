"""How a matrix is divided among programs. By its shape alone, so that sums have the same bits on every device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

# Sums over rows go through one row of partial sums per program: two for each of the 132 multiprocessors of an H200,
# whose partial sums of 4096 columns are 4 MiB beside the 128 MiB of 8192 rows in 16 bit that are read twice.
SUMMING_PROGRAMS = 264
_ELEMENTS_PER_WARP = 256


@dataclass(frozen=True)
class Tile:
    """What a program holds at a time.

    Attributes:
        rows: a power of two.
        columns: a power of two.
    """

    rows: int
    columns: int

    @classmethod
    def of(cls, rows: int, width: int, *, elements: int = 1024, widest: int) -> Tile:
        """As many of ``rows`` as make up ``elements``, one at least, by at most ``widest`` of ``width`` columns."""
        columns = min(power_of_two(width), widest)
        return cls(min(power_of_two(rows), max(1, elements // columns)), columns)

    @property
    def warps(self) -> int:
        """Of a program: 8 elements per thread, in 16 bits one load of 16 bytes; more where 32 warps are not enough."""
        return max(1, min(32, self.rows * self.columns // _ELEMENTS_PER_WARP))


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << max(number - 1, 0).bit_length()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of ``dtype`` are computed in."""
    return torch.promote_types(dtype, torch.float32)


def in_triton(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of what numbers of ``dtype`` are computed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def device_of(tensor: torch.Tensor) -> torch.cuda.device:
    """Makes the tensor's device the one that kernels are launched on; nothing changes for tensors of a CPU."""
    return torch.cuda.device(tensor.get_device())
