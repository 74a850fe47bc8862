"""A checkpoint of any layout as one model in one process: what generate and evaluate work with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.checkpoint.directory import METADATA, CheckpointError, find_latest
from trainer.checkpoint.load import load_weights
from trainer.checkpoint.metadata import load_metadata
from trainer.config import ParallelConfig, TrainConfig, build_config
from trainer.mesh import ParallelMesh, ProcessGroups
from trainer.train_state import build_model

if TYPE_CHECKING:
    from trainer.train_state import ParallelModel


@dataclass(frozen=True)
class SerialModel:
    """The model of a checkpoint, whole.

    Attributes:
        model: on ``device``, with tp, pp and dp of 1.
        config: of the run that wrote the checkpoint, but for the layout.
        vocab_size: number of token ids, without padding.
        checkpoint: the folder it came from.
        iteration: iterations of training behind it.
        device: where it is.
    """

    model: ParallelModel
    config: TrainConfig
    vocab_size: int
    checkpoint: Path
    iteration: int
    device: torch.device


def load_serial_model(path: Path, device: torch.device | None = None) -> SerialModel:
    """Load the checkpoint at ``path``: a folder iter_*, one that holds such folders (the latest), or a run directory.

    Args:
        path: where to look.
        device: None: the first GPU, or the CPU.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    checkpoint = find_checkpoint(path)
    metadata = load_metadata(checkpoint)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = build_config(metadata.config)
    # A batch size that suited many replicas need not divide by one.
    training = trained.training.model_copy(update={"global_batch_size": None})
    config = trained.model_copy(update={"parallel": ParallelConfig(), "training": training})
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    model = build_model(config, metadata.vocab_size, mesh, ProcessGroups(), device)
    load_weights(checkpoint, model)
    model.chunks[0].eval()
    return SerialModel(model, config, metadata.vocab_size, checkpoint, metadata.iteration, device)


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint that ``path`` names or holds.

    Raises:
        CheckpointError: there is none.
    """
    if (path / METADATA).is_file():
        return path
    for root in (path / "checkpoints", path):
        latest, _ = find_latest(root)
        if latest is not None:
            return latest
    raise CheckpointError(f"{path}: holds no checkpoint; name a folder iter_*, the folder of such, or a run directory")
