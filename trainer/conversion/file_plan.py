"""Files that a conversion writes: planned first, then written tensor by tensor, and kept when it is started again.

A file gets its final name when it is complete and on the disk. ``conversion.json`` in the unfinished folder describes
source and plan; a later start with the same description writes only the files that are missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from trainer.checkpoint.directory import CONVERSION as DESCRIPTION
from trainer.conversion.errors import ConversionError
from trainer.hub.tensor_file import Planned, TensorFile
from trainer.process.run_directory import sync_directory

_SPARE_BYTES = 64 << 20
"""Room for headers, metadata and tokenizer files."""


class Unit(NamedTuple):
    """Tensors that are converted together, and stand next to each other in one file.

    Attributes:
        planned: the tensors, in the order in which ``convert`` returns them.
        convert: computes their elements, possibly in several runs along the first dim.
    """

    planned: tuple[Planned, ...]
    convert: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.bytes for tensor in self.planned)


@dataclass(frozen=True)
class PlannedFile:
    """A file and the units in it."""

    name: str
    units: tuple[Unit, ...]

    @property
    def bytes(self) -> int:
        """Size of all tensors in the file."""
        return sum(unit.bytes for unit in self.units)


def plan_files(units: Sequence[Unit], most_bytes: int, name: Callable[[int, int], str]) -> list[PlannedFile]:
    """Distribute units over files of at most ``most_bytes``, in order; a larger unit has a file of its own.

    Args:
        units: of the whole model.
        most_bytes: largest size of the tensors in a file.
        name: (number from 1, number of files) -> name of the file.
    """
    groups: list[list[Unit]] = []
    size = 0
    for unit in units:
        if not groups or size + unit.bytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.bytes
    # The widest elements first, so that every tensor begins at a multiple of its elements' size, as mapping requires.
    ordered = [sorted(group, key=lambda unit: -unit.planned[0].dtype.itemsize) for group in groups]
    return [PlannedFile(name(number, len(ordered)), tuple(group)) for number, group in enumerate(ordered, 1)]


def write_files(
    folder: Path, files: Sequence[PlannedFile], description: str, advance: Callable[[int], None]
) -> dict[str, int]:
    """Write the files that ``folder`` lacks; returns the size of every file.

    Args:
        folder: an unfinished folder, made if it is missing; emptied if it is of another conversion.
        files: the plan.
        description: of source and plan; equal descriptions continue each other.
        advance: called with the bytes of each tensor that is written or was there.

    Raises:
        ConversionError: the disk has too little room, or a file cannot be written.
    """
    try:
        _prepare(folder, description)
        missing = [file for file in files if not (folder / file.name).is_file()]
        _check_room(folder, sum(file.bytes for file in missing))
        for file in files:
            if file not in missing:
                advance(file.bytes)
                continue
            _write_file(folder, file, advance)
        sync_directory(folder)
        return {file.name: (folder / file.name).stat().st_size for file in files}
    except OSError as error:
        raise ConversionError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from error


def finish(folder: Path) -> None:
    """Remove the description: the folder holds nothing else that readers do not know."""
    (folder / DESCRIPTION).unlink(missing_ok=True)


def _prepare(folder: Path, description: str) -> None:
    path = folder / DESCRIPTION
    if folder.is_dir() and (not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != description):
        shutil.rmtree(folder)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        path.write_text(json.dumps(description), encoding="utf-8")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise ConversionError(
            f"{folder.parent}: needs {needed / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free; "
            "remove files, or give --output on another disk"
        )


def _write_file(folder: Path, file: PlannedFile, advance: Callable[[int], None]) -> None:
    partial = folder / f"{file.name}.partial"
    planned = [tensor for unit in file.units for tensor in unit.planned]
    with TensorFile(partial, planned, {"format": "pt"}) as target:
        for unit in file.units:
            for tensor in unit.convert():
                target.write(tensor)
                advance(tensor.numel() * tensor.element_size())
                del tensor  # before the next is converted
    partial.replace(folder / file.name)
