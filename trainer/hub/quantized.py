"""Weights that are published in 8 or 4 bits, read as bfloat16.

fp8: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3.2: one float32 scale for each block of 128 x 128. mxfp4: OCP
Microscaling Formats 1.0, sections 5.2 and 5.3.3: one power of two for each 32 elements of 4 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.families.format.quantization import fp8_block, quantization_method, quantization_problem
from trainer.hub.errors import HubError

_FP8, _MXFP4 = "F8_E4M3", "U8"
_SCALE_OF_FP8, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_ROWS_AT_ONCE = 1 << 10


class StoredAs(NamedTuple):
    """A tensor as its readers see it.

    Attributes:
        file: name of the file; of the first of its parts if it is quantized.
        dtype: safetensors' name of its dtype.
        shape: its shape.
        packed: how its elements are stored; None for as they are.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    packed: Fp8 | Mxfp4 | None = None


@dataclass(frozen=True)
class Fp8:
    """Elements of 8 bits with a scale for each block.

    Attributes:
        parts: names of elements and scales.
        block: rows and columns of a block.
    """

    parts: tuple[str, str]
    block: tuple[int, int]

    def unpack(self, read: Callable[[str], Tensor]) -> Tensor:
        """The matrix, each element rounded once. ``read`` gives a stored tensor by its name."""
        elements, scales = (read(name) for name in self.parts)
        return unpack_fp8(elements, scales.float(), self.block)


@dataclass(frozen=True)
class Mxfp4:
    """Two elements of 4 bits in a byte, along the last dim of [E, out, in]; readers see [E, in, out].

    Attributes:
        parts: names of elements and scales.
    """

    parts: tuple[str, str]

    def unpack(self, read: Callable[[str], Tensor]) -> Tensor:
        """The matrices. ``read`` gives a stored tensor, or a run of its experts, by its name."""
        blocks, scales = (read(name) for name in self.parts)
        return unpack_mxfp4(blocks, scales).transpose(1, 2)


def unpack_fp8(elements: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Bfloat16 of an fp8 matrix [out, in]: element times its block's scale in float32, rounded once.

    Args:
        elements: float8_e4m3fn.
        scales: [ceil(out / rows), ceil(in / columns)], float32.
        block: rows and columns of a block.
    """
    result = torch.empty(elements.shape, dtype=torch.bfloat16)
    rows, columns = block
    for first in range(0, len(elements), rows):
        part = elements[first : first + rows].float()
        factors = scales[first // rows].repeat_interleave(columns)[: part.shape[1]]
        result[first : first + rows] = part.mul_(factors)
    return result


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Bfloat16 [..., 32 G] of blocks [..., G, 16] of bytes, low half first, and scales [..., G]: 2^(scale - 127)."""
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # of each byte: low half, high half
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _EXPONENT_BIAS)
    flat, exponents = blocks.reshape(-1, blocks.shape[-1]), scales.reshape(-1)
    result = torch.empty(len(flat), 2 * blocks.shape[-1], dtype=torch.bfloat16)
    step = _ROWS_AT_ONCE * 64
    for first in range(0, len(flat), step):
        one = pairs[flat[first : first + step].int()].flatten(1)
        result[first : first + step] = one.mul_(powers[exponents[first : first + step].int()].unsqueeze(1))
    return result.view(*blocks.shape[:-2], -1)


def see_through(stored: Mapping[str, StoredAs], config: Any, path: Path) -> dict[str, StoredAs]:
    """The tensors as readers see them: quantized ones as bfloat16 under their own names, without their scales.

    Args:
        stored: entries of the files' headers.
        config: ``quantization_config`` of config.json; None without one.
        path: folder, for messages.

    Raises:
        HubError: the weights are quantized in another way, or parts of a tensor are missing or do not fit.
    """
    if config is None:
        return dict(stored)
    problem = quantization_problem(config)
    if problem is not None:
        raise HubError(f"{path}: {problem}")
    block = fp8_block(config) if quantization_method(config) == "fp8" else None
    return _see_mxfp4(stored, path) if block is None else _see_fp8(stored, block, path)


def _see_fp8(stored: Mapping[str, StoredAs], block: tuple[int, int], path: Path) -> dict[str, StoredAs]:
    seen: dict[str, StoredAs] = {}
    for name, entry in stored.items():
        scale = stored.get(name + _SCALE_OF_FP8)
        if name.endswith(_SCALE_OF_FP8) and name.removesuffix(_SCALE_OF_FP8) in stored:
            continue
        if entry.dtype != _FP8:
            seen[name] = entry
            continue
        if scale is None:
            raise HubError(f"{path / entry.file}: {name} is fp8, but there is no {name + _SCALE_OF_FP8}")
        grid = tuple(math.ceil(size / one) for size, one in zip(entry.shape, block, strict=False))
        if len(entry.shape) != 2 or scale.shape != grid:
            raise HubError(
                f"{path / scale.file}: {name + _SCALE_OF_FP8} is {list(scale.shape)}, but {name} {list(entry.shape)} "
                f"in blocks of {block[0]} x {block[1]} has {list(grid)}"
            )
        seen[name] = StoredAs(entry.file, "BF16", entry.shape, Fp8((name, name + _SCALE_OF_FP8), block))
    return seen


def _see_mxfp4(stored: Mapping[str, StoredAs], path: Path) -> dict[str, StoredAs]:
    seen: dict[str, StoredAs] = {}
    for name, entry in stored.items():
        if entry.dtype != _MXFP4:
            seen[name] = entry
            continue
        base = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks, scales = stored.get(base + _BLOCKS), stored.get(base + _SCALES)
        if blocks is None or scales is None:
            lacks = base + (_BLOCKS if blocks is None else _SCALES)
            raise HubError(f"{path / entry.file}: {name} is mxfp4, but there is no {lacks}")
        if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape:
            raise HubError(
                f"{path / scales.file}: {base + _SCALES} is {list(scales.shape)}, but {base + _BLOCKS} is "
                f"{list(blocks.shape)}; a scale belongs to each block"
            )
        experts, rows, groups, width = blocks.shape
        shape = (experts, groups * width * 2, rows)
        seen[base] = StoredAs(blocks.file, "BF16", shape, Mxfp4((base + _BLOCKS, base + _SCALES)))
    return seen
