"""Tensors of a checkpoint's files, verified and read in blocks from mapped memory."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.checksums import VerifiedFile
from trainer.checkpoint.directory import CheckpointError, DamagedCheckpointError
from trainer.checkpoint.fill import Block, fill_region
from trainer.checkpoint.metadata import CheckpointMetadata, StoredPart, StoredTensor, stored_key
from trainer.checkpoint.regions import Region, regions_of_flat_range


class StoredTensors(ExitStack):
    """All tensors of one checkpoint; opens every file once, and the system reads only the pages in use.

    Every byte is compared with its checksum before it is used, if the checkpoint has checksums.
    """

    def __init__(self, checkpoint: Path, metadata: CheckpointMetadata) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._metadata = metadata
        self._files: dict[str, Any] = {}
        self._verified: dict[str, _VerifiedTensors] = {}
        self._parts = cache(self._sorted_parts)
        self._maps = self.enter_context(ExitStack())

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
        self._maps.close()
        self._files.clear()

    def _sorted_parts(self, kind: str, name: str) -> _Parts:
        return _Parts(self._metadata.tensors[kind][name])

    def _read(self, what: str, part: StoredPart, region: Region) -> Tensor:
        first = region.start - part.start
        stop = first + math.prod(region.shape)
        self._verify(what, part, first, stop)
        return self._map(what, part)[first:stop].view(region.shape)

    def _verify(self, what: str, part: StoredPart, first: int, stop: int) -> None:
        """Compare the header and the elements from ``first`` to ``stop`` of a part with their checksums.

        Raises:
            DamagedCheckpointError: they differ, or the file cannot be read.
        """
        checksums = self._metadata.checksums.get(part.file)
        if checksums is None:
            return
        path = self._checkpoint / part.file
        try:
            if part.file not in self._verified:
                opened = self.enter_context(closing(VerifiedFile(path, checksums)))
                self._verified[part.file] = _VerifiedTensors(opened)
            damage = self._verified[part.file].find_damage(part.key, first, stop, part.stop - part.start)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{what} cannot be read: {part.file}: {type(error).__name__}: {error}"
            raise DamagedCheckpointError(problem) from error
        if damage is not None:
            raise DamagedCheckpointError(f"{what} cannot be read: {part.file} {damage}")

    def _map(self, what: str, part: StoredPart) -> Tensor:
        """The flattened elements of a part in mapped memory."""
        try:
            if part.file not in self._files:
                opened = safe_open(str(self._checkpoint / part.file), framework="pt", device="cpu")
                self._files[part.file] = self._maps.enter_context(opened)
            tensor: Tensor = self._files[part.file].get_tensor(part.key)
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
        if tensor.numel() != part.stop - part.start:
            raise DamagedCheckpointError(
                f"{what} has {tensor.numel()} elements in {part.file}, but {part.stop - part.start} in metadata.json; "
                "the checkpoint is damaged, choose another"
            )
        return tensor.view(-1)


class _VerifiedTensors:
    """A safetensors file whose bytes are compared with their checksums."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int]] | None = None

    def find_damage(self, key: str, first: int, stop: int, count: int) -> str | None:
        """The damage in the header, or in the elements from ``first`` to ``stop`` of a tensor of ``count``; or None."""
        if self._places is None:
            # The first block has the size of the header, without which its end is unknown.
            damage = self._file.find_damage(0, 8) or self._file.find_damage(0, self._file.header_bytes)
            if damage is not None:
                return damage
            start = self._file.header_bytes
            self._places = {
                name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
                for name, entry in self._file.header().items()
                if name != "__metadata__"
            }
        begin, end = self._places[key]
        item = (end - begin) // max(1, count)
        return self._file.find_damage(begin + first * item, begin + stop * item)


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
