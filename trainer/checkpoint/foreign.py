"""Recognition of folders in other programs' formats, where a checkpoint of this trainer is expected. Torch-free."""

from __future__ import annotations

from pathlib import Path

from trainer.config.foreign_formats import HUB_CONFIG, ForeignFormat, Listing, format_of


def foreign_format(folder: Path) -> ForeignFormat | None:
    """Format of a folder on this machine; None if it is of no other program, or cannot be read.

    Args:
        folder: a folder of checkpoints, a single checkpoint, or a Hugging Face folder.
    """
    try:
        iterations = {entry.name: _names(entry) for entry in sorted(folder.glob("iter_*")) if entry.is_dir()}
        config = folder / HUB_CONFIG
        text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
        return format_of(Listing(_names(folder), iterations, text))
    except OSError:
        return None


def describe_foreign(folder: Path) -> str | None:
    """One sentence on a folder in another program's format: its format, and what to do; None for all others."""
    found = foreign_format(folder)
    return None if found is None else found.problem


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]
