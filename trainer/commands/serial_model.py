"""A checkpoint of any layout as one model in one process.

generate and evaluate use this model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.checkpoint.directory import METADATA, CheckpointError, find_latest
from trainer.checkpoint.load import load_weights
from trainer.checkpoint.metadata import load_metadata
from trainer.config.sections import ParallelConfig
from trainer.config.train_config import TrainConfig
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.ops.dispatch.setup import serial_kernels
from trainer.parallel_model import build_model, parameter_dtype
from trainer.planning.build_config import build_config

if TYPE_CHECKING:
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.parallel_model import ParallelModel


@dataclass(frozen=True)
class SerialModel:
    """The whole model of a checkpoint.

    Attributes:
        model: on ``device``, with tp, pp and dp of 1.
        config: of the run that wrote the checkpoint, except for the layout and the choice of attention kernels.
        vocab_size: number of token ids, without padding.
        checkpoint: folder of the checkpoint.
        iteration: training iterations that the model has seen.
        device: device of the parameters.
        notes: reasons for ops that run without the best kernels, one line each.
    """

    model: ParallelModel
    config: TrainConfig
    vocab_size: int
    checkpoint: Path
    iteration: int
    device: torch.device
    notes: tuple[str, ...] = ()


def load_serial_model(
    path: Path, device: torch.device | None = None, settings: BuildSettings | None = None
) -> SerialModel:
    """Load the checkpoint at ``path`` into one process.

    Args:
        path: a folder iter_*, a folder that contains them (takes the latest), or a run directory.
        device: None takes the first GPU, or the CPU.
        settings: folders of built kernels; None uses the reference backends.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    checkpoint = find_checkpoint(path)
    metadata = load_metadata(checkpoint)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = build_config(metadata.config)
    # A batch size for many replicas need not suit a single replica.
    training = trained.training.model_copy(update={"global_batch_size": None})
    # The kernels of the training run may be missing here, and do not change the model.
    model_config = trained.model.model_copy(update={"attention_backend": "auto"})
    config = trained.model_copy(update={"model": model_config, "parallel": ParallelConfig(), "training": training})
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    selection = None
    if settings is not None:
        selection = serial_kernels(config, settings, device, parameter_dtype(config.training))
    kernels, notes = (None, []) if selection is None else (selection.kernels, selection.fallbacks())
    model = build_model(config, metadata.vocab_size, mesh, ProcessGroups(), device, kernels)
    load_weights(checkpoint, model)
    model.chunks[0].eval()
    return SerialModel(model, config, metadata.vocab_size, checkpoint, metadata.iteration, device, tuple(notes))


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint that ``path`` names or contains.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if (path / METADATA).is_file():
        return path
    for root in (path / "checkpoints", path):
        latest, _ = find_latest(root)
        if latest is not None:
            return latest
    raise CheckpointError(
        f"{path}: holds no checkpoint; name a folder iter_*, the folder that contains it, or a run directory"
    )
