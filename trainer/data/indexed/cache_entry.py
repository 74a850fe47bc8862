"""Files of a cache: put in place whole, and removed when nobody needs them any more."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LEFT_OVER_SECONDS = 3600.0
"""A partial file that nobody has written to for so long is of a process that was killed."""

UNUSED_SECONDS = 30 * 86_400.0
"""Entries that nobody has used for so long are removed when another one is written."""


def write_entry(entry: Path, write: Callable[[BinaryIO], object]) -> None:
    """Make ``entry`` of what ``write`` writes; any number of processes may do so at once, and the last one's stays.

    Raises:
        OSError: it cannot be written; what was there before still is.
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
    """Remove the files of ``folder`` whose last change is more than ``seconds`` ago; those that can be removed."""
    before = time.time() - seconds
    for path in folder.glob(pattern):
        with suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()
