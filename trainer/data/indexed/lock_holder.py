"""Name of the process that holds a lock file, written into the file for the message of a refused start."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_HOLDER = re.compile(r"process \d+ on \S+")


def name_holder(descriptor: int) -> None:
    """Write this process into the lock file that it holds, in place of an earlier holder."""
    with suppress(OSError):  # a full disk: the refusal says "another process"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)


def holders_of(paths: Sequence[Path]) -> str:
    """The processes that lock files name; ``another process`` if they name none."""
    found = []
    for path in paths:
        with suppress(OSError):
            found.append(path.read_text(encoding="utf-8", errors="replace"))
    return " and ".join(text for text in found if _HOLDER.fullmatch(text)) or "another process"
