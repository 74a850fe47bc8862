"""Cache of compiled objects by content: an update recompiles only changed sources. Torch-free."""

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
"""Time since an object's last use after which it is removed."""


@dataclass(frozen=True)
class ObjectCache:
    """Compiled objects in a folder of a BuildCache.

    Attributes:
        folder: folder of the objects.
    """

    folder: Path

    def name(self, source: Path, words: Sequence[str]) -> str:
        """File name of an object, with a hash over everything that determines it.

        Args:
            source: the source, hashed with all files that it includes in quotes.
            words: other inputs, such as compiler and flags.
        """
        digest = hashlib.sha256("\0".join(words).encode())
        for path in sorted(_included(source.resolve(), set())):
            digest.update(path.read_bytes())
        return f"{source.parent.name}-{source.stem}-{digest.hexdigest()[:24]}.o"

    def take(self, name: str, target: Path) -> bool:
        """Copy an object to ``target``. Returns True if the object exists."""
        path = self.folder / name
        content = read_sealed(path)
        if content is None:
            return False
        with suppress(OSError):
            os.utime(path)
        target.write_bytes(content)
        return True

    def keep(self, name: str, made: Path) -> None:
        """Keep a copy of a compiled object. Ignores errors of the file system."""
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            aside = made.with_suffix(".kept")
            shutil.copyfile(made, aside)
            aside.chmod(0o600)
            seal(aside, self.folder / name)
            aside.rename(self.folder / name)

    def clear(self) -> None:
        """Remove objects after long disuse."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                if time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink()


def _included(path: Path, found: set[Path]) -> set[Path]:
    """``path`` and all files that it includes in quotes, directly or indirectly.

    Missing files are skipped, because the compiler reports them.
    """
    if path in found or not path.is_file():
        return found
    found.add(path)
    for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
        _included((path.parent / name).resolve(), found)
    return found
