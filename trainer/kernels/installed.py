"""What was installed under a name, by the folders of metadata that installers leave. Torch-free.

importlib.metadata fails at files that are not UTF-8, knows no name where they are missing, and reads them all whatever
their size; packages that were built by hand have all of that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_READ = 1 << 16
"""Bytes of a file that are looked at: what counts stands in far fewer."""
_LONGEST = 60
"""Of a name or a version, in characters."""


@dataclass(frozen=True)
class Distribution:
    """What was installed, as its folder of metadata says, or if that says nothing, as the folder is called.

    Attributes:
        name: its name.
        version: its version.
        origin: the address that it came from, with what else stands in that file.
    """

    name: str
    version: str
    origin: str


def find_distribution(name: str, path: Sequence[str]) -> Distribution | None:
    """The first one of that name in the folders of ``path``, if there is one.

    Where metadata stand: https://packaging.python.org/en/latest/specifications/recording-installed-packages/, and for
    eggs, into which ``setup.py install`` puts extensions, setuptools' "The Internal Structure of Python Eggs".
    """
    for folder in map(Path, path):
        inside = [(entry, entry) for entry in _entries(folder) if entry.suffix in (".dist-info", ".egg-info")]
        if folder.suffix == ".egg":
            inside.append((folder / "EGG-INFO", folder))
        for place, named in inside:
            words = named.stem.split("-")
            if normalized(words[0]) == normalized(name):
                text = _head(place / "METADATA") or _head(place / "PKG-INFO") or _head(place)
                version = words[1][:_LONGEST] if len(words) > 1 else "of no known version"
                return Distribution(
                    _field("Name", text) or words[0][:_LONGEST],
                    _field("Version", text) or version,
                    _head(place / "direct_url.json"),
                )
    return None


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError, ValueError):
        return sorted(folder.iterdir())
    return []


def normalized(name: str) -> str:
    """As names of packages are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _head(path: Path) -> str:
    """The beginning of a file; nothing if it cannot be read."""
    with suppress(OSError):
        # Opening a pipe would wait for a writer.
        if path.is_file():
            with path.open("rb") as file:
                return file.read(MOST_READ).decode(errors="replace")
    return ""


def _field(name: str, text: str) -> str:
    """A field of metadata, cut to what a sentence has room for."""
    found = re.search(rf"^{name}:[ \t]*(\S[^\r\n]*)", text, re.MULTILINE | re.IGNORECASE)
    return found[1].strip()[:_LONGEST] if found is not None else ""
