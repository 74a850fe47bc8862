"""Check of the folder of copies of the newest state."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_EXAMPLE = "name a folder that each node has for itself, such as /dev/shm"


def check_copies(config: TrainConfig) -> None:
    """Refuse copies without a folder or an interval, and a folder that the nodes share with the checkpoints.

    Raises:
        ConfigError: names the key.
    """
    checkpoint, save = config.checkpoint, config.checkpoint.save
    interval, folder = checkpoint.copy_interval, checkpoint.copy_folder
    if folder is None and interval is not None:
        raise ConfigError(
            "checkpoint.copy_folder", f"is not set, but copy_interval is {interval}; {_EXAMPLE}, or unset copy_interval"
        )
    if folder is None:
        return
    if interval is None:
        raise ConfigError(
            "checkpoint.copy_interval",
            f"is not set, but copy_folder is {folder}; give a number of iterations, or unset copy_folder",
        )
    path = PurePath(os.path.normpath(folder))
    if not path.is_absolute():
        raise ConfigError("checkpoint.copy_folder", f"{folder} is not an absolute path; {_EXAMPLE}")
    shared = PurePath(os.path.normpath(save)) if save is not None else None
    if shared is not None and shared in (path, *path.parents):
        raise ConfigError(
            "checkpoint.copy_folder", f"{folder} is in checkpoint.save {save}, which the nodes share; {_EXAMPLE}"
        )
