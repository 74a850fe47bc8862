"""Which clusters there are, by the names of their files alone: for completion and lists, without reading a profile."""

import re
from pathlib import Path

from llmctl.paths import UserFolders, search_path

ARGUMENT = "NAME"
"""What the commands that take a cluster as an argument call it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def profile_files(folders: UserFolders, name: str) -> list[Path]:
    """The files that make up a profile, the one that is laid over the others last; empty if there is none."""
    if not NAME.fullmatch(name):
        return []
    found = [folder / f"{name}.yaml" for folder in reversed(search_path(folders, "clusters"))]
    return [path for path in found if path.is_file()]


def cluster_names(folders: UserFolders) -> list[str]:
    """Every cluster that there is a profile for, sorted."""
    return sorted({path.stem for folder in search_path(folders, "clusters") for path in folder.glob("*.yaml")})
