"""Cache of results computed by reading large files, valid until a file changes.

A check that a file is complete must read all of the file; with this cache the next process and the next run need not
repeat the check. An entry is valid for a file of the same path, size, inode and change times, until the next reboot.
Every write changes these times, but with the resolution of the file system's clock: therefore no entry is kept for a
file that has just been changed.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainer.data.indexed.cache_entry import UNUSED_SECONDS, remove_older, write_entry

STEP_NS = 2_000_000_000
"""Resolution of the coarsest file-system clock (FAT)."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CHECK_BYTES = 8


@dataclass(frozen=True)
class ChecksumCache:
    """Cache of results about files, in one folder; safe for concurrent processes."""

    folder: Path
    """Need not exist; without write permission nothing is kept."""
    MIN_BYTES: ClassVar[int] = 4 << 20
    """Smallest file with a cache entry; smaller files are read in a few milliseconds."""

    def recall(self, file: Path, what: str) -> bytes | None:
        """Return the result kept under the key ``what`` for ``file``.

        None: no entry, or the file has changed.
        """
        with suppress(OSError):
            status = file.stat()
            if status.st_size >= self.MIN_BYTES:
                place = self._place(file, status, what)
                kept = place.read_bytes()
                found = kept[_CHECK_BYTES:]
                return found if kept == _sealed(place, found) else None
        return None

    def keep(self, file: Path, before: os.stat_result, what: str, found: bytes) -> None:
        """Keep ``found`` under the key ``what`` for ``file``.

        ``before`` is the file's status before the read.
        """
        with suppress(OSError):
            status = file.stat()
            changed = max(status.st_mtime_ns, status.st_ctime_ns)
            is_settled = _identity(before) == _identity(status) and time.time_ns() - changed > STEP_NS
            if is_settled and status.st_size >= self.MIN_BYTES:
                place = self._place(file, status, what)
                write_entry(place, lambda entry: entry.write(_sealed(place, found)))
                remove_older(self.folder, "*.known", UNUSED_SECONDS)

    def _place(self, file: Path, status: os.stat_result, what: str) -> Path:
        asked = f"{what} {file.absolute()} {_identity(status)} {_BOOT.read_text()}"
        return self.folder / f"{hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()}.known"


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sealed(place: Path, found: bytes) -> bytes:
    return hashlib.blake2b(place.name.encode() + found, digest_size=_CHECK_BYTES).digest() + found
