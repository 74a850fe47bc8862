"""Verification of a complete checkpoint: every byte of every file. Torch-free."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from trainer.checkpoint.checksums import VerifiedFile
from trainer.checkpoint.directory import CheckpointError, damage
from trainer.checkpoint.metadata import load_metadata


def find_damage(checkpoint: Path) -> str | None:
    """The damage of a checkpoint, with the file, to follow its name; None without.

    Reads all files. Of a checkpoint of an older release, without checksums, only sizes and metadata are compared.
    """
    problem = damage(checkpoint)
    if problem is not None:
        return problem
    try:
        metadata = load_metadata(checkpoint)
    except CheckpointError as error:
        return f"is damaged ({error})"
    for name, checksums in metadata.checksums.items():
        try:
            with closing(VerifiedFile(checkpoint / name, checksums)) as file:
                found = file.find_any_damage()
        except OSError as error:
            found = f"cannot be read: {error.strerror or error}"
        if found is not None:
            return f"is damaged ({name} {found})"
    for kind, tensors in metadata.tensors.items():
        for name, tensor in tensors.items():
            if not tensor.is_complete:
                return f"is damaged ({kind} tensor {name} is incomplete)"
    return None
