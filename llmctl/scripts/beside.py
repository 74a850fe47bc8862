"""Files beside a script that the script reads with ``source``: parameters, which the trainer needs to know."""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.values import Value

_UNKNOWN, _SHOWN = "\0", 5
_MAX_BYTES = 1_000_000
OF_THE_ENVIRONMENT = ("activate", "modules.sh", "conda.sh")
"""Endings of files that set an environment up, which the cluster's profile does here."""


class FilesBeside:
    """Files in the folder of a script, and below; and below folders that the user named."""

    def __init__(self, script: Path, given: Iterable[str] = ()) -> None:
        """Look beside ``script``, and below folders among the values that the user gave; ``texts`` are those read."""
        self._folder = script.parent.resolve()
        self._given = [Path(value).resolve() for value in given if value.startswith("/")]
        self.texts: list[str] = []
        self._read: list[Path] = []

    def text_of(self, name: Value) -> tuple[str, str] | None:
        """Name and text of a file that a script reads; None if the file is elsewhere or prepares the environment.

        A folder that only the job knows, and the folder that has the script where the script was written, are the
        script's own folder.

        Raises:
            ScriptError: files beside the script fit the name, and a variable decides which one is read.
        """
        pattern = "".join(chunk.text if chunk.missing is None else _UNKNOWN for chunk in name)
        for place in self._places(pattern):
            if place.endswith(OF_THE_ENVIRONMENT):
                return None
            if _UNKNOWN in place:
                self._ask(place, name)
                continue
            found = (self._folder / place).resolve()
            is_near = any(found.is_relative_to(folder) for folder in (self._folder, *self._given))
            if is_near and found.is_file() and found.stat().st_size <= _MAX_BYTES:
                self._read.append(found)
                self.texts.append(found.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n"))
                return place, self.texts[-1]
        return None

    def _is_new(self, path: Path) -> bool:
        """True for a file that the script has not read: one that reads it again would never end."""
        return path.is_file() and path.resolve() not in self._read

    def _places(self, pattern: str) -> Iterator[str]:
        """Paths below the script's folder that a name can mean."""
        own = f"/{self._folder.name}/"
        if own in pattern:
            yield posixpath.normpath(pattern.rpartition(own)[2])
        if pattern.startswith("/") and _UNKNOWN not in pattern:
            yield posixpath.normpath(pattern)
        elif not pattern.startswith("/"):
            yield posixpath.normpath(pattern.lstrip(_UNKNOWN).lstrip("/"))

    def _ask(self, place: str, name: Value) -> None:
        """Ask for the variable of a name that fits files beside the script."""
        missing = next((chunk.missing for chunk in reversed(name) if chunk.missing is not None), None)
        parts = [glob.escape(part) for part in place.split(_UNKNOWN)]
        if missing is None or not missing.name or not any(re.search(r"\w", part) for part in parts):
            return
        # A value may name folders too, where it begins a part of the path.
        deep = "".join(part + ("**/*" if not part or part.endswith("/") else "*") for part in parts[:-1]) + parts[-1]
        found = {*self._folder.glob("*".join(parts)), *self._folder.glob(deep)}
        files = sorted(str(path.relative_to(self._folder)) for path in found if self._is_new(path))
        if files:
            before, _, after = place.partition(_UNKNOWN)
            are_values = place.count(_UNKNOWN) == 1
            if are_values:
                files = [file[len(before) : len(file) - len(after)] for file in files]
            else:
                files = [posixpath.basename(file) for file in files]
            shown = ", ".join(files[:_SHOWN]) + (", ..." if len(files) > _SHOWN else "")
            problem = f"{missing.problem}; by the files beside the script one of {shown}"
            raise ScriptError.asking(missing.line, problem, missing.name, files if are_values else [])


def unread_files(skipped: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Line and name of the files that the script reads and that are elsewhere.

    Args:
        skipped: line and words of the shell's commands that have no meaning here.
    """
    words = [(line, text.split()) for line, text in skipped]
    read = [(line, found[1]) for line, found in words if len(found) > 1 and found[0] in ("source", ".")]
    return [(line, name) for line, name in read if not name.endswith(OF_THE_ENVIRONMENT)]
