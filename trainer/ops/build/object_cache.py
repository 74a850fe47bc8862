"""Compiled files, kept by what they were compiled from: an update compiles anew only what it changed. Torch-free."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.ops.build.build_cache import read_sealed, seal

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_KEPT_S = 30 * 24 * 3600.0
"""Since an object was last used."""


@dataclass(frozen=True)
class ObjectCache:
    """Objects in a folder of a BuildCache.

    Attributes:
        folder: where they are.
    """

    folder: Path

    def name(self, source: Path, words: Sequence[str]) -> str:
        """What an object is kept under.

        Args:
            source: what is compiled, with all that it includes in quotes.
            words: whatever else makes a difference.
        """
        digest = hashlib.sha256("\0".join(words).encode())
        for path in sorted(_included(source.resolve(), set())):
            digest.update(path.read_bytes())
        return f"{source.parent.name}-{source.stem}-{digest.hexdigest()[:24]}.o"

    def take(self, name: str, target: Path) -> bool:
        """Put an object to ``target``; whether there is such an object."""
        path = self.folder / name
        content = read_sealed(path)
        if content is None:
            return False
        with suppress(OSError):
            os.utime(path)
        target.write_bytes(content)
        return True

    def keep(self, name: str, made: Path) -> None:
        """Keep a copy of what was compiled. Not being able to is no error."""
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            aside = made.with_suffix(".kept")
            shutil.copyfile(made, aside)
            aside.chmod(0o600)
            seal(aside, self.folder / name)
            aside.rename(self.folder / name)

    def clear(self) -> None:
        """Remove what has not been used for long."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                if time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink()


def _included(path: Path, found: set[Path]) -> set[Path]:
    """``path`` and the files that it includes in quotes, and so on; of missing ones the compiler complains."""
    if path in found or not path.is_file():
        return found
    found.add(path)
    for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
        _included((path.parent / name).resolve(), found)
    return found
