"""The checkpoint that a path names."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.directory import (
    METADATA,
    CheckpointError,
    ForeignFormatError,
    checkpoint_path,
    complete_iterations,
    find_latest,
    unfinished_import,
)
from trainer.checkpoint.foreign import describe_foreign


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint that ``path`` names or contains: an iter_*, a folder of them, or a run directory.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ForeignFormatError: the folder holds a model in another program's format.
    """
    foreign = describe_foreign(path)
    if foreign is not None:
        raise ForeignFormatError(f"{path} {foreign}")
    if (path / METADATA).is_file():
        return path
    for root in (path / "checkpoints", path):
        latest, _ = find_latest(root)
        if latest is not None:
            return latest
        source = unfinished_import(root)
        if source is not None:
            raise CheckpointError(
                f"{root}: holds an import of {source} that is not finished; go on with it: "
                f"llmctl checkpoint import {source} --output {root}"
            )
    raise CheckpointError(
        f"{path}: holds no checkpoint; name a folder iter_*, the folder that contains it, or a run directory"
    )


def holds_native(path: Path) -> bool:
    """True if the folder is a complete checkpoint of this trainer, or contains one."""
    return (path / METADATA).is_file() or bool(all_checkpoints(path))


def all_checkpoints(path: Path) -> list[Path]:
    """All complete checkpoints that ``path`` contains, ascending: a folder of them, or a run directory."""
    for root in (path / "checkpoints", path):
        found = [checkpoint_path(root, iteration) for iteration in complete_iterations(root)]
        if found:
            return found
    return []
