"""Names of clusters, and of schedulers that installed packages add. No profile is read."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.paths import UserFolders, search_path

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ARGUMENT = "NAME"
"""What the commands that take a cluster as an argument call it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
BACKEND_ENTRY_POINTS = "llmctl.backends"
"""Group of the entry points by which an installed package adds a scheduler, as ``lsf = "package.module:BACKEND"``."""


def profile_files(folders: UserFolders, name: str) -> list[Path]:
    """The files that make up a profile, the one that is laid over the others last; empty if there is none."""
    if not NAME.fullmatch(name):
        return []
    found = [folder / f"{name}.yaml" for folder in reversed(search_path(folders, "clusters"))]
    return [path for path in found if path.is_file()]


def cluster_names(folders: UserFolders) -> list[str]:
    """Every cluster that there is a profile for, sorted."""
    return sorted({path.stem for folder in search_path(folders, "clusters") for path in folder.glob("*.yaml")})


def installed_backends() -> "dict[str, EntryPoint]":
    """Schedulers that installed packages add, by name. Reads the metadata of all packages: some milliseconds."""
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=BACKEND_ENTRY_POINTS)}
