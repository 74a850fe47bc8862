"""Tensors of a checkpoint's files, read in blocks from mapped memory."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.fill import Block, fill_region
from trainer.checkpoint.metadata import CheckpointMetadata, StoredPart, StoredTensor, stored_key
from trainer.checkpoint.regions import Region, regions_of_flat_range


class StoredTensors(ExitStack):
    """All tensors of one checkpoint; opens every file once, and the system reads only the pages in use."""

    def __init__(self, checkpoint: Path, metadata: CheckpointMetadata) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._metadata = metadata
        self._files: dict[str, Any] = {}
        self._parts = cache(self._sorted_parts)

    def describe(self, kind: str, name: str) -> str:
        """Checkpoint and tensor, for messages."""
        return f"{self._checkpoint}: {stored_key(kind, name)}"

    def blocks(self, kind: str, name: str, requested: Region) -> Iterator[Block]:
        """All blocks that may have elements in a region of a global tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._metadata.tensors.get(kind, {}):
            raise CheckpointError(f"{self.describe(kind, name)} cannot be read: there is no such tensor")
        for part in self._parts(kind, name).near(requested):
            for region in regions_of_flat_range(part.offset, part.shape, part.start, part.stop):
                yield Block(region.offset, region.shape, partial(self._read, self.describe(kind, name), part, region))

    def read(self, kind: str, name: str, offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A box of a global tensor: in mapped memory if one part holds exactly that, else in new memory.

        Raises:
            CheckpointError: a file cannot be read, or the tensor has gaps.
        """
        region = Region(offset, shape, 0)
        blocks = list(self.blocks(kind, name, region))
        if len(blocks) == 1 and (blocks[0].offset, blocks[0].shape) == (offset, shape):
            return blocks[0].read().to(dtype)
        target = torch.empty(shape, dtype=dtype)
        fill_region(self.describe(kind, name), blocks, region, target)
        self.release()
        return target

    def release(self) -> None:
        """Unmap the files, which the next read maps again.

        Pages that were read count as memory of the process until then, although the system can drop them.
        """
        self.close()
        self._files.clear()

    def _sorted_parts(self, kind: str, name: str) -> _Parts:
        return _Parts(self._metadata.tensors[kind][name])

    def _read(self, what: str, part: StoredPart, region: Region) -> Tensor:
        first = region.start - part.start
        return self._map(what, part)[first : first + math.prod(region.shape)].view(region.shape)

    def _map(self, what: str, part: StoredPart) -> Tensor:
        """The flattened elements of a part in mapped memory."""
        try:
            if part.file not in self._files:
                opened = safe_open(str(self._checkpoint / part.file), framework="pt", device="cpu")
                self._files[part.file] = self.enter_context(opened)
            tensor: Tensor = self._files[part.file].get_tensor(part.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
        if tensor.numel() != part.stop - part.start:
            raise CheckpointError(
                f"{what} has {tensor.numel()} elements in {part.file}, but {part.stop - part.start} in metadata.json; "
                "the checkpoint is damaged, choose another"
            )
        return tensor.view(-1)


class _Parts:
    """The parts of one tensor, indexed by their rows of dim 0.

    A rank needs a few parts out of thousands.
    """

    def __init__(self, stored: StoredTensor) -> None:
        spans = [(*_rows(part), part) for part in stored.parts]
        spans.sort(key=lambda span: span[0])
        self._parts = [part for _, _, part in spans]
        self._firsts = [first for first, _, _ in spans]
        # Largest stop so far: no part before the first place where this exceeds a row reaches that row.
        self._stops = list(accumulate((stop for _, stop, _ in spans), max))

    def near(self, requested: Region) -> list[StoredPart]:
        """All parts that may have elements in a region of the global tensor."""
        first, stop = requested.offset[0], requested.offset[0] + requested.shape[0]
        return self._parts[bisect_right(self._stops, first) : bisect_left(self._firsts, stop)]


def _rows(part: StoredPart) -> tuple[int, int]:
    """First row of dim 0 in a part, and the row after the last.

    Rows are counted in the global tensor.
    """
    row = math.prod(part.shape[1:])
    return part.offset[0] + part.start // row, part.offset[0] + -(-part.stop // row)
