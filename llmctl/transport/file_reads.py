"""Read parts of many files at once, to follow logs and metrics. Standard library only.

One call of ``read_parts`` or ``list_names`` is one round trip, whatever the number of ranks, so that a transport to
another machine can answer the call with one command. The local transport calls these functions directly.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmctl.supervisor import trust

DEFAULT_LIMIT = 1 << 20


@dataclass(frozen=True)
class FileRead:
    """Request for at most ``limit`` bytes of ``path`` from ``offset``; a negative offset counts from the end.

    With ``asks_owner``, the answer names another user who owns the file or its folder.
    """

    path: str
    offset: int = 0
    limit: int = DEFAULT_LIMIT
    asks_owner: bool = False


@dataclass(frozen=True)
class FilePart:
    """Bytes read, their offset, and the size of the whole file at that moment.

    ``owner`` is another user who owns the file or its folder, if asked; empty for this user and root.
    """

    data: bytes
    offset: int
    size: int
    owner: str = field(default="", compare=False)

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
        # A pipe in the place of a file would keep its reader waiting.
        descriptor = os.open(read.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                return None
            size = file.seek(0, 2)
            offset = max(0, size + read.offset) if read.offset < 0 else min(read.offset, size)
            file.seek(offset)
            owner = _other_owner(read.path, facts.st_uid) if read.asks_owner else ""
            return FilePart(file.read(read.limit), offset, size, owner)
    except OSError:
        return None


def _other_owner(path: str, uid: int) -> str:
    """Name of another user who owns a file, or its folder; else empty."""
    owners = (uid, Path(path).parent.stat().st_uid)
    return next((trust.user_name(one) for one in owners if not trust.is_trusted_owner(one)), "")


def list_names(directories: Sequence[str]) -> list[list[str]]:
    """Sorted names in each directory; empty for a directory that is absent or cannot be read."""
    return [_names(Path(directory)) for directory in directories]


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []
