"""What a checkpoint says about itself: metadata.json. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import METADATA, CheckpointError

FORMAT = "llmctl-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: the entries ``start`` to ``stop`` of the divided dim (the whole, where none is divided)."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and where its parts are.

    Attributes:
        shape: of the global tensor; vocabulary tables without padding, so that any layout can add its own.
        dtype: safetensors' name, such as F32.
        dim: dim that the parts divide, or None for a single part.
        shards: the parts, in order.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything in a checkpoint that is not a tensor.

    Attributes:
        progress: trainer.progress.TrainingProgress as plain values.
        config: the resolved TrainConfig as plain values.
        vocab_size: rows of the vocabulary tables that mean something.
        layout: tp, pp and dp of the run that wrote it; for people, not needed to load.
        optimizer: name and number of steps; None where only weights were saved.
        loss_scaler: state of the loss scaler.
        tensors: kind (``model``, ``master``, a moment) -> global name -> tensor.
        files: name -> bytes.
    """

    progress: Mapping[str, Any]
    config: Mapping[str, Any]
    vocab_size: int
    layout: Mapping[str, int]
    optimizer: Mapping[str, Any] | None
    loss_scaler: Mapping[str, Any] | None
    tensors: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def iteration(self) -> int:
        """Iterations of training behind these weights."""
        return int(self.progress["iteration"])

    def as_json(self) -> dict[str, Any]:
        """The content of metadata.json."""
        return {"format": FORMAT, "version": VERSION, "iteration": self.iteration, **asdict(self)}


def load_metadata(checkpoint: Path) -> CheckpointMetadata:
    """Read metadata.json of a complete checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is of a newer version.
    """
    try:
        values = json.loads((checkpoint / METADATA).read_text(encoding="utf-8"))
        if values["format"] != FORMAT or values["version"] > VERSION:
            raise CheckpointError(
                f"{checkpoint} has format {values['format']} version {values['version']}; this trainer reads {FORMAT} "
                f"up to version {VERSION}"
            )
        tensors = {
            kind: {name: _stored_tensor(tensor) for name, tensor in named.items()}
            for kind, named in values["tensors"].items()
        }
        plain = {
            key: values[key]
            for key in ("progress", "config", "vocab_size", "layout", "optimizer", "loss_scaler", "files")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / METADATA} cannot be read: {type(error).__name__}: {error}") from None
    return CheckpointMetadata(tensors=tensors, **plain)


def _stored_tensor(values: Mapping[str, Any]) -> StoredTensor:
    shards = tuple(Shard(**shard) for shard in values["shards"])
    return StoredTensor(tuple(values["shape"]), values["dtype"], values["dim"], shards)
