"""llmctl's own code that a run uses, with the sha256 of each file: trainer and ops, and the supervisor.

Hashing reads hundreds of files. Their checksums are remembered in the user's state folder, and used again while size,
times and inode of every file are the same. A job compares the checksums at its start, so that a wrong memory cannot
start other code (see llmctl.supervisor.trust).
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmctl.paths import BUNDLED, PACKAGE, TRAINER, UserFolders
from llmctl.transport.file_writes import FileWrite, write_files

LEFT_OUT = frozenset({"__pycache__", ".git"})
"""Folders that are not code."""
_SETTLED_S = 2.0
"""A file changed again within one tick of the file system's clock, at most 2 s, can keep its times."""


@dataclass(frozen=True)
class CodeTree:
    """Files of a snapshot.

    Attributes:
        files: name below the snapshot's folder, which begins with the tree's own name -> file of this machine.
        checksums: name -> sha256.
    """

    files: Mapping[str, Path]
    checksums: Mapping[str, str]

    @cached_property
    def address(self) -> str:
        """Content address: sha256 over names and contents."""
        lines = "".join([f"{name}\0{found}\n" for name, found in self.checksums.items()])
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def trainer_code(folders: UserFolders) -> CodeTree:
    """The trainer and the sources of its ops."""
    return _tree("trainer", (TRAINER, BUNDLED / "csrc"), folders)


def supervisor_code(folders: UserFolders) -> CodeTree:
    """The supervisor of job.sh."""
    return _tree("supervisor", (PACKAGE / "supervisor",), folders)


def checksums_of(files: Mapping[str, Path]) -> dict[str, str]:
    """sha256 of each file, by name."""
    return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in sorted(files)}


def _tree(name: str, roots: Sequence[Path], folders: UserFolders) -> CodeTree:
    files, facts, newest = _look(roots)
    memory = folders.state / "code" / f"{name}.json"
    known = _recall(memory, facts)
    if known is None:
        known = checksums_of(files)
        if time.time() - newest > _SETTLED_S:
            with suppress(OSError):  # only time is lost
                write_files([FileWrite(str(memory), json.dumps({"facts": facts, "checksums": known}).encode())])
    return CodeTree(files, known)


def _look(roots: Sequence[Path]) -> tuple[dict[str, Path], str, float]:
    """Files below folders by name, a digest of their facts, and the time of the last change."""
    rows: list[tuple[str, int, int, int, int]] = []
    places: dict[str, Path] = {}
    newest = 0
    for root in roots:
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(set(inner) - LEFT_OUT)
            below = f"{root.name}{folder[len(str(root)) :]}"
            for name in names:
                path = Path(folder, name)
                if name.endswith(".pyc") or not path.is_file():
                    continue
                facts = path.stat()
                places[f"{below}/{name}"] = path
                rows.append((f"{below}/{name}", facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino))
                newest = max(newest, facts.st_mtime_ns, facts.st_ctime_ns)
    text = repr(sorted(rows)).encode("utf-8", "surrogateescape")
    return places, hashlib.sha256(text).hexdigest(), newest / 1e9


def _recall(memory: Path, facts: str) -> dict[str, str] | None:
    """The remembered checksums of files with these facts; None without any."""
    try:
        kept = json.loads(memory.read_bytes())
        return dict(kept["checksums"]) if kept["facts"] == facts else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
