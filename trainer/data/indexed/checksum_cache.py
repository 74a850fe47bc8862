"""What was found out about large files by reading all of them, kept for as long as they do not change.

Whether a file is whole takes reading it whole; once that was done, the next process and the next run need not do it
again. What is kept holds for a file of this path, size, inode and times of change, and until this machine starts anew.
Whatever is written to the file changes its times, but by a clock that goes in steps: of a file that was changed just
now nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from trainer.data.indexed.cache_entry import UNUSED_SECONDS, remove_older, write_entry

LEAST_BYTES = 4 << 20
"""Smaller files are read in a few milliseconds."""
STEP_NS = 2_000_000_000
"""The coarsest clock of a file system (FAT)."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CHECK_BYTES = 8


class KnownFiles:
    """What is known of files, kept in one folder; any number of processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        """In ``folder``, which need not exist, and where nothing is kept if it cannot be written."""
        self._folder = folder

    def recall(self, file: Path, what: str) -> bytes | None:
        """What was kept as ``what`` of ``file``; None: nothing, or the file is not what it was."""
        with suppress(OSError):
            status = file.stat()
            if status.st_size >= LEAST_BYTES:
                place = self._place(file, status, what)
                kept = place.read_bytes()
                found = kept[_CHECK_BYTES:]
                return found if kept == _sealed(place, found) else None
        return None

    def keep(self, file: Path, before: os.stat_result, what: str, found: bytes) -> None:
        """Keep ``found`` as ``what`` of ``file``, whose status was ``before`` when it began to be read."""
        with suppress(OSError):
            status = file.stat()
            changed = max(status.st_mtime_ns, status.st_ctime_ns)
            is_settled = _identity(before) == _identity(status) and time.time_ns() - changed > STEP_NS
            if is_settled and status.st_size >= LEAST_BYTES:
                place = self._place(file, status, what)
                write_entry(place, lambda entry: entry.write(_sealed(place, found)))
                remove_older(self._folder, "*.known", UNUSED_SECONDS)

    def _place(self, file: Path, status: os.stat_result, what: str) -> Path:
        asked = f"{what} {file.absolute()} {_identity(status)} {_BOOT.read_text()}"
        return self._folder / f"{hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()}.known"


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sealed(place: Path, found: bytes) -> bytes:
    return hashlib.blake2b(place.name.encode() + found, digest_size=_CHECK_BYTES).digest() + found
