"""Read parts of many files at once, to follow logs and metrics. Standard library only.

One call of ``read_parts`` or ``list_names`` is one round trip, whatever the number of ranks, so that a transport to
another machine can answer the call with one command. The local transport calls these functions directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_LIMIT = 1 << 20


@dataclass(frozen=True)
class FileRead:
    """Request for at most ``limit`` bytes of ``path`` from ``offset``; a negative offset counts from the end."""

    path: str
    offset: int = 0
    limit: int = DEFAULT_LIMIT


@dataclass(frozen=True)
class FilePart:
    """Bytes read, their offset, and the size of the whole file at that moment."""

    data: bytes
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the next read."""
        return self.offset + len(self.data)


def read_parts(reads: Sequence[FileRead]) -> list[FilePart | None]:
    """Requested parts, in order; None for a file that is absent or cannot be read.

    An offset past the end gives an empty part with the file's true size, by which the reader sees a truncation.
    """
    return [_read_part(read) for read in reads]


def _read_part(read: FileRead) -> FilePart | None:
    try:
        with Path(read.path).open("rb") as file:
            size = file.seek(0, 2)
            offset = max(0, size + read.offset) if read.offset < 0 else min(read.offset, size)
            file.seek(offset)
            return FilePart(file.read(read.limit), offset, size)
    except OSError:
        return None


def list_names(directories: Sequence[str]) -> list[list[str]]:
    """Sorted names in each directory; empty for a directory that is absent or cannot be read."""
    return [_names(Path(directory)) for directory in directories]


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []
