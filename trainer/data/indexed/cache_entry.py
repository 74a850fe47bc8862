"""Files of a cache: written atomically, and removed when unused."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LEFT_OVER_SECONDS = 3600.0
"""Age at which a partial file counts as left over by a killed process."""

UNUSED_SECONDS = 30 * 86_400.0
"""Age since the last use at which entries are removed; checked when another entry is written."""


def write_entry(entry: Path, write: Callable[[BinaryIO], object]) -> None:
    """Atomically write ``entry`` by calling ``write``; of concurrent processes the last one wins.

    Raises:
        OSError: the file cannot be written; a previous entry stays unchanged.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    remove_older(entry.parent, f".{entry.name}.*", LEFT_OVER_SECONDS)
    descriptor, name = tempfile.mkstemp(prefix=f".{entry.name}.", dir=entry.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(entry)
    finally:
        partial.unlink(missing_ok=True)


def remove_older(folder: Path, pattern: str, seconds: float) -> None:
    """Remove files of ``folder`` that match ``pattern`` and are older than ``seconds``."""
    before = time.time() - seconds
    for path in folder.glob(pattern):
        with suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()
