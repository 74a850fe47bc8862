"""Tensors of a torch.distributed.checkpoint folder (``.metadata`` and ``*.distcp``), read one chunk at a time.

Both kinds of file hold pickles. No object is made of them but those of the classes named here: a file from elsewhere
cannot run code (https://docs.python.org/3/library/pickle.html#restricting-globals).
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import types
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from trainer.checkpoint.fill import Block, fill_region
from trainer.checkpoint.regions import Region
from trainer.conversion.errors import ConversionError

METADATA = ".metadata"
_COMMON_FILE, _COMMON_ENTRY = "common.pt", "common_state/shard_0_1"

_DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ImportError)
"""Errors of torch.load and pickle on a file that is cut or changed."""


class _Inert:
    """Takes the place of an object of any other class: keeps nothing and does nothing."""

    def __init__(self, *_: object) -> None:
        """Take the arguments of any class."""

    def __setstate__(self, _: object) -> None:
        """Take the state of any class."""

    def append(self, _: object) -> None:
        """Take an entry of a list."""

    def __setitem__(self, *_: object) -> None:
        """Take an entry of a mapping."""


_METADATA_CLASSES: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): filesystem._StoragePrefix,
    ("torch.serialization", "_get_layout"): str,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    # Megatron-core 0.15 puts these around its plans (megatron/core/dist_checkpointing/strategies/torch.py).
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Inert,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}
_COMMON_CLASSES: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of ``.metadata`` and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of an object in the file."""
        found = _METADATA_CLASSES.get((module, name)) or _dtype(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it holds an object of {module}.{name}, which no checkpoint needs")
        return found


class _CommonUnpickler(pickle.Unpickler):
    """Makes plain values and argparse.Namespace; everything else becomes an inert object."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of an object in the file."""
        return _COMMON_CLASSES.get((module, name)) or _dtype(module, name) or _Inert


def _dtype(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


class Stored(NamedTuple):
    """A tensor of the folder: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class DistributedFiles(ExitStack):
    """An open folder. All chunks lie within their files."""

    def __init__(self, path: Path):
        """Read the metadata and check the sizes of the files.

        Raises:
            ConversionError: a file is missing, cut or damaged, or holds an object of a class that is not needed.
        """
        super().__init__()
        self.path = path
        self._metadata = self._read_metadata()
        entries = self._metadata.state_dict_metadata
        self._chunks = {
            name: entry.chunks for name, entry in entries.items() if isinstance(entry, metadata.TensorStorageMetadata)
        }
        self.tensors: Mapping[str, Stored] = {
            name: Stored(tuple(entries[name].size), entries[name].properties.dtype) for name in self._chunks
        }
        """All tensors, by name."""
        self._places: dict[tuple[str, tuple[int, ...] | None], Any] = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): place
            for index, place in self._metadata.storage_data.items()
        }
        self._files = {place.relative_path: self._open(place.relative_path) for place in self._places.values()}
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}
        for place in self._places.values():
            if place.offset + place.length > sizes[place.relative_path]:
                raise ConversionError(f"{path / place.relative_path}: is cut; copy the checkpoint again")

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a tensor, in new memory.

        Raises:
            ConversionError: a file is damaged.
            CheckpointError: the chunks leave gaps, or overlap.
        """
        target = torch.empty(shape, dtype=self.tensors[name].dtype)
        blocks = [
            Block(tuple(chunk.offsets), tuple(chunk.sizes), partial(self._read_chunk, name, tuple(chunk.offsets)))
            for chunk in self._chunks[name]
        ]
        fill_region(f"{self.path}: {name}", blocks, Region(offset, shape, 0), target)
        return target

    def common(self) -> Mapping[str, Any]:
        """The values that Megatron-core stores beside the tensors; empty if there are none.

        Raises:
            ConversionError: they cannot be read.
        """
        try:
            if (self.path / _COMMON_FILE).is_file():
                with (self.path / _COMMON_FILE).open("rb") as file:
                    found = _load_common(file)
            elif (_COMMON_ENTRY, None) in self._places:
                place = self._places[_COMMON_ENTRY, None]
                [found] = _load_common(io.BytesIO(self._slice(place).read()))
            else:
                return {}
        except (*_DAMAGE, pickle.UnpicklingError) as error:
            raise ConversionError(f"{self.path}: its common state cannot be read: {_first_line(error)}") from None
        return found if isinstance(found, dict) else {}

    def _read_chunk(self, name: str, offset: tuple[int, ...]) -> Tensor:
        place = self._places.get((name, offset))
        if place is None:
            raise ConversionError(f"{self.path / METADATA}: names no place of {name} at {list(offset)}")
        try:
            tensor: Tensor = torch.load(self._slice(place), map_location="cpu", weights_only=True)
        except (*_DAMAGE, pickle.UnpicklingError) as error:
            raise ConversionError(
                f"{self.path / place.relative_path}: {name} is damaged: {_first_line(error)}"
            ) from None
        return tensor

    def _slice(self, place: Any) -> BinaryIO:
        return _Slice(self._files[place.relative_path], place.offset, place.length)

    def _read_metadata(self) -> Any:
        try:
            with (self.path / METADATA).open("rb") as file:
                found = _MetadataUnpickler(file).load()
        except FileNotFoundError:
            raise ConversionError(f"{self.path / METADATA}: is missing, so that no tensor can be found") from None
        except (*_DAMAGE, pickle.UnpicklingError) as error:
            raise ConversionError(f"{self.path / METADATA}: cannot be read: {_first_line(error)}") from None
        if not isinstance(found, metadata.Metadata) or found.storage_data is None:
            raise ConversionError(f"{self.path / METADATA}: is not metadata of torch.distributed.checkpoint")
        return found

    def _open(self, name: str) -> BinaryIO:
        if Path(name).name != name:
            raise ConversionError(f"{self.path / METADATA}: names the file {name}, which is not in this folder")
        try:
            return self.enter_context((self.path / name).open("rb"))
        except OSError as error:
            raise ConversionError(f"{self.path / name}: cannot be read: {error.strerror or error}") from None


def _first_line(error: Exception) -> str:
    """The error in one line: torch adds advice for programs."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _load_common(file: BinaryIO) -> Any:
    module = types.ModuleType("restricted_pickle")
    module.Unpickler, module.load = _CommonUnpickler, pickle.load  # type: ignore[attr-defined]
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=module)


class _Slice(io.RawIOBase, BinaryIO):
    """A part of an open file as a file of its own, without a copy."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def seekable(self) -> bool:
        """True: it can be read in any order."""
        return True

    def tell(self) -> int:
        """The next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, counted from the start, the position or the end."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        count = os.preadv(self._file.fileno(), [view], self._start + self._position)
        self._position += count
        return count
