"""A checkpoint of iteration 0 with weights from another program, written tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.checksums import checksum_file
from trainer.checkpoint.directory import IMPORT_ATTEMPT, METADATA, checkpoint_path, import_path, publish
from trainer.checkpoint.metadata import CheckpointMetadata, StoredPart, StoredTensor
from trainer.config.train_config import TrainConfig
from trainer.conversion.errors import ConversionError
from trainer.conversion.file_plan import PlannedFile, Unit, finish, plan_files, write_files
from trainer.hub.side_files import SIDE_FOLDER
from trainer.hub.tensor_file import DTYPE_NAMES
from trainer.process.progress import TrainingProgress
from trainer.process.run_directory import sync_directory

MAX_BYTES_PER_FILE = 2 << 30


@dataclass(frozen=True)
class Imported:
    """Content of a checkpoint.

    Attributes:
        units: all tensors under our global names.
        config: of a run with this model.
        vocab_size: rows of the vocabulary tables.
        write_side_files: writes the files beside the weights, which exports need, into a folder; None without any.
        description: of the source: equal descriptions continue each other's unfinished folder.
    """

    units: Sequence[Unit]
    config: TrainConfig
    vocab_size: int
    write_side_files: Callable[[Path], None] | None
    description: str


def final_path(output: Path) -> Path:
    """Folder of the checkpoint that an import into ``output`` makes.

    Raises:
        ConversionError: it exists.
    """
    final = checkpoint_path(output, 0)
    if final.exists():
        raise ConversionError(f"{final}: exists already; name another folder as --output")
    return final


def write_imported(imported: Imported, output: Path, advance: Callable[[int], None]) -> Path:
    """Write the checkpoint into ``output``; returns its folder. An interrupted import is continued by the next.

    Raises:
        ConversionError: the output has a checkpoint, the disk has too little room, or writing fails.
    """
    final = final_path(output)
    files = plan_files(imported.units, MAX_BYTES_PER_FILE, lambda number, _: f"model_{number:05d}.safetensors")
    temporary = import_path(output)
    sizes = write_files(temporary, files, imported.description, advance)
    try:
        if imported.write_side_files is not None:
            imported.write_side_files(output / SIDE_FOLDER)
        checksums = {name: checksum_file(temporary / name) for name in sizes}
        metadata = replace(_metadata(imported, files, sizes), checksums=checksums)
        (temporary / METADATA).write_text(json.dumps(metadata.as_json()), encoding="utf-8")
        finish(temporary)
        sync_directory(temporary)
        publish(temporary, output, 0, IMPORT_ATTEMPT)
    except OSError as error:
        raise ConversionError(f"{error.filename or output}: cannot be written: {error.strerror or error}") from error
    return final


def describe_files(source: Path, files: Sequence[Path]) -> str:
    """Names, sizes and times of the files of a source."""
    stats = [(entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in files]
    return json.dumps([str(source.resolve()), stats])


def training_values(longest: int, dtypes: set[str]) -> dict[str, Any]:
    """Section ``training`` of a config for imported weights.

    Args:
        longest: positions of the model.
        dtypes: safetensors' names of the dtypes of its tensors.
    """
    values: dict[str, Any] = {"train_iters": 0, "seq_length": longest}
    if "F32" not in dtypes or "BF16" in dtypes:
        values |= {"bf16": True} if "BF16" in dtypes else {"fp16": True}
    return values


def _metadata(imported: Imported, files: Sequence[PlannedFile], sizes: Mapping[str, int]) -> CheckpointMetadata:
    tensors = {
        tensor.name: StoredTensor(
            tensor.shape,
            DTYPE_NAMES[tensor.dtype],
            (StoredPart(file.name, tensor.name, (0,) * len(tensor.shape), tensor.shape, 0, math.prod(tensor.shape)),),
        )
        for file in files
        for unit in file.units
        for tensor in unit.planned
    }
    return CheckpointMetadata(
        progress=TrainingProgress().state(),
        config=imported.config.model_dump(mode="json"),
        vocab_size=imported.vocab_size,
        layout={},
        optimizer=None,
        loss_scaler=None,
        tensors={"model": tensors},
        files=sizes,
    )
