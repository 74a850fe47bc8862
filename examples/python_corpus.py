"""Real text present on every machine with Python: the standard library's source files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "ensurepip"}
"""Folders outside the library proper, folders that some distributions remove, and character tables."""
MAX_BYTES = 10_000_000
LARGEST_FILE = 400_000
"""Larger files are tables, such as pydoc_data/topics.py, and would dominate a held-out split."""


@dataclass(frozen=True)
class SourceFile:
    """One source file: its name below the library's folder, and its path."""

    name: str
    path: Path

    def read(self) -> str:
        """Read the text with unchanged line ends."""
        return self.path.read_bytes().decode("utf-8")


def standard_library_files(root: Path | None = None) -> list[SourceFile]:
    """Source files of the standard library, 10 MB at most, in an order fixed by name.

    The order is by hash of the name: any contiguous part is a fair sample, so that the last part can be held out.

    Args:
        root: the library's folder; None: that of the running Python.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = sorted(_candidates(root), key=lambda file: hashlib.sha256(file.name.encode()).digest())
    chosen, size = [], 0
    for file in found:
        size += file.path.stat().st_size
        if size > MAX_BYTES:
            break
        chosen.append(file)
    return chosen


def _candidates(root: Path) -> Iterator[SourceFile]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts[:-1]) and 0 < path.stat().st_size <= LARGEST_FILE and _is_utf8(path):
            yield SourceFile(name.as_posix(), path)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
