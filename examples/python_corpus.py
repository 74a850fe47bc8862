"""Real text that is on every machine that can run us: the Python standard library's own source files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "ensurepip"}
"""Folders with what is not the library, what some distributions strip, and tables of characters."""
MOST_BYTES = 10_000_000
LARGEST_FILE = 400_000
"""Larger ones are tables, such as pydoc_data/topics.py, and would be a good part of a held-out split."""


@dataclass(frozen=True)
class SourceFile:
    """One source file: its name below the library's folder, and where it lies."""

    name: str
    path: Path

    def read(self) -> str:
        """Its text, line ends as they are."""
        return self.path.read_bytes().decode("utf-8")


def standard_library_files(root: Path | None = None) -> list[SourceFile]:
    """Source files of the standard library, 10 MB at most, in an order that depends on their names alone.

    Ordered by the hash of their names: any contiguous part is a fair sample, so that the last part can be held out.

    Args:
        root: the library's folder; None: that of the running Python.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = sorted(_candidates(root), key=lambda file: hashlib.sha256(file.name.encode()).digest())
    chosen, size = [], 0
    for file in found:
        size += file.path.stat().st_size
        if size > MOST_BYTES:
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
