"""Metadata of a checkpoint: metadata.json. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.checksums import BLOCK_BYTES, METADATA_CHECKSUM, checksum_of_metadata, is_metadata_sound
from trainer.checkpoint.directory import METADATA, CheckpointError, DamagedCheckpointError
from trainer.checkpoint.regions import Box, is_partition, regions_of_flat_range
from trainer.config.sections.training import replace_removed_backends

FORMAT = "llmctl-checkpoint"
VERSION = 2
_ALGORITHM = "crc32"


class StoredPart(NamedTuple):
    """A flat range of a shard box, and its place in a file.

    The range is contiguous in the flattened box, a part of a global tensor.

    Attributes:
        file: name of the file.
        key: of the stored tensor, which has the box's shape if it is the whole box, else one dim.
        offset: of the box in the global tensor.
        shape: of the box.
        start: position of the first element in the flattened box.
        stop: position after the last element.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and the places of its parts.

    Attributes:
        shape: of the global tensor; vocabulary tables without padding, so that any layout can add its own.
        dtype: safetensors' name, such as F32.
        parts: which together hold every element once.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredPart, ...]

    @property
    def is_complete(self) -> bool:
        """True if the parts hold every element of the tensor once."""
        flat_ranges: dict[Box, list[StoredPart]] = {}
        for part in self.parts:
            flat_ranges.setdefault((part.offset, part.shape), []).append(part)
        boxes: list[Box] = []
        for box, parts in flat_ranges.items():
            boxes += [box] if _are_whole(box, parts) else _regions(parts)
        return is_partition(boxes, self.shape)


def _are_whole(box: Box, parts: Sequence[StoredPart]) -> bool:
    """True if flat ranges of one box cover it in sequence.

    This is the common case: the shards of dp ranks.
    """
    ends = sorted((part.start, part.stop) for part in parts)
    edges = [0, *(stop for _, stop in ends)]
    return [start for start, _ in ends] == edges[:-1] and edges[-1] == math.prod(box[1])


def _regions(parts: Sequence[StoredPart]) -> list[Box]:
    return [
        (region.offset, region.shape)
        for part in parts
        for region in regions_of_flat_range(part.offset, part.shape, part.start, part.stop)
    ]


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything in a checkpoint that is not a tensor.

    Attributes:
        progress: trainer.process.progress.TrainingProgress as plain values.
        config: the resolved TrainConfig as plain values.
        vocab_size: rows of the vocabulary tables without padding.
        layout: sizes of the axes, ZeRO stage and pipeline schedule of the run that wrote the checkpoint; for people,
            not needed to load.
        optimizer: name and number of steps; None if only weights were saved.
        loss_scaler: state of the loss scaler.
        tensors: kind (``model``, ``master``, a moment) -> global name -> tensor.
        files: name -> bytes.
        kernels: operation -> label of its backend in the run that wrote the checkpoint; empty if not recorded.
        checksums: name -> checksums of the file's blocks; empty for a checkpoint of a release without them.
        fencing_token: of the run's lock when the checkpoint was written; None without a lock.
        notes: values of an earlier release in ``config`` that are taken as others, one sentence each.
    """

    progress: Mapping[str, Any]
    config: Mapping[str, Any]
    vocab_size: int
    layout: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    loss_scaler: Mapping[str, Any] | None
    tensors: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    fencing_token: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def iteration(self) -> int:
        """Training iterations that these weights have seen."""
        return int(self.progress["iteration"])

    @property
    def is_imported(self) -> bool:
        """True if the weights come from another program: no run of this trainer has a layout of its own here."""
        return not self.layout and self.optimizer is None and self.iteration == 0

    def as_json(self) -> dict[str, Any]:
        """The content of metadata.json."""
        tensors = {
            kind: {
                name: {"shape": tensor.shape, "dtype": tensor.dtype, "parts": tensor.parts}
                for name, tensor in named.items()
            }
            for kind, named in self.tensors.items()
        }
        plain = {key: getattr(self, key) for key in _PLAIN}
        values = {"format": FORMAT, "version": VERSION, "iteration": self.iteration, **plain, "tensors": tensors}
        values["kernels"] = self.kernels
        if self.fencing_token is not None:
            values["fencing_token"] = self.fencing_token
        values["checksums"] = {"algorithm": _ALGORITHM, "block_bytes": BLOCK_BYTES, "files": self.checksums}
        return {**values, METADATA_CHECKSUM: checksum_of_metadata(values)}


_PLAIN = ("progress", "config", "vocab_size", "layout", "optimizer", "loss_scaler", "files")


def load_metadata(checkpoint: Path) -> CheckpointMetadata:
    """Read metadata.json of a complete checkpoint.

    Raises:
        CheckpointError: the file has a newer version.
        DamagedCheckpointError: the file cannot be read.
    """
    try:
        values = json.loads((checkpoint / METADATA).read_text(encoding="utf-8"))
        if values["format"] != FORMAT or values["version"] > VERSION:
            raise CheckpointError(
                f"{checkpoint} has format {values['format']} version {values['version']}; this trainer reads {FORMAT} "
                f"up to version {VERSION}"
            )
        is_old = values["version"] == 1
        tensors = {
            kind: {
                name: _stored_tensor_of_version_1(kind, name, tensor) if is_old else stored_tensor(tensor)
                for name, tensor in named.items()
            }
            for kind, named in values["tensors"].items()
        }
        plain = {key: values[key] for key in _PLAIN}
        plain["config"], notes = replace_removed_backends(plain["config"])
        kernels, token = dict(values.get("kernels", {})), values.get("fencing_token")
        checksums = _known_checksums(values)
        # Compared here, told below: a flipped bit can also make the JSON unreadable.
        is_sound = is_metadata_sound(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{checkpoint / METADATA} cannot be read: {type(error).__name__}: {error}"
        raise DamagedCheckpointError(problem) from None
    if not is_sound:
        raise DamagedCheckpointError(f"{checkpoint / METADATA} is damaged: it has altered bytes")
    return CheckpointMetadata(
        tensors=tensors, kernels=kernels, checksums=checksums, fencing_token=token, notes=tuple(notes), **plain
    )


def _known_checksums(values: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """The checksums of the files; none of a kind that this release cannot compute."""
    found = values.get("checksums", {})
    if (found.get("algorithm"), found.get("block_bytes")) != (_ALGORITHM, BLOCK_BYTES):
        return {}
    return {name: found["files"][name] for name in values["files"]}


def stored_key(kind: str, name: str) -> str:
    """Key, within its file, of a rank's first part of a tensor."""
    return name if kind == "model" else f"{kind}.{name}"


def stored_tensor(values: Mapping[str, Any]) -> StoredTensor:
    """Build a StoredTensor from its plain values in metadata.json."""
    parts = tuple(
        StoredPart(file, key, tuple(offset), tuple(shape), start, stop)
        for file, key, offset, shape, start, stop in values["parts"]
    )
    return StoredTensor(tuple(values["shape"]), values["dtype"], parts)


def _stored_tensor_of_version_1(kind: str, name: str, values: Mapping[str, Any]) -> StoredTensor:
    """Convert the metadata of one tensor from version 1.

    Version 1 had slices along one dim only: the dim, and for each slice its file, first row and row after the last.
    """
    whole, dim, parts = tuple(values["shape"]), values["dim"] or 0, []
    for shard in values["shards"]:
        offset = (*(0 for _ in whole[:dim]), shard["start"], *(0 for _ in whole[dim + 1 :]))
        shape = (*whole[:dim], shard["stop"] - shard["start"], *whole[dim + 1 :])
        parts.append(StoredPart(shard["file"], stored_key(kind, name), offset, shape, 0, math.prod(shape)))
    return StoredTensor(whole, values["dtype"], tuple(parts))
