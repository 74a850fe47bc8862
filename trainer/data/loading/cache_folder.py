"""Folder of the caches of an indexed dataset."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.config.sections.data import DataConfig


def cache_folder(data: DataConfig, prefix: Path, run_dir: Path | None) -> Path | None:
    """Folder for the caches of the dataset ``prefix``, which need not exist; None if none can be written.

    data.data_cache_path, or ``cache`` beside the dataset, or in the run directory if the former is read-only.
    """
    if data.data_cache_path:
        return Path(data.data_cache_path).expanduser()
    beside = prefix.parent / "cache"
    if os.access(beside if beside.is_dir() else prefix.parent, os.W_OK):
        return beside
    return run_dir / "cache" if run_dir else None
