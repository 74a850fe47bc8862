"""Names of clusters, and of schedulers that installed packages add. No profile is read."""

from typing import TYPE_CHECKING

from llmctl.paths import UserFolders, search_path

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ARGUMENT = "NAME"
"""What the commands that take a cluster as an argument call it."""
BACKEND_ENTRY_POINTS = "llmctl.backends"
"""Group of the entry points by which an installed package adds a scheduler, as ``flux = "package.module:BACKEND"``."""


def cluster_names(folders: UserFolders) -> list[str]:
    """Every cluster that there is a profile for, sorted."""
    return sorted({path.stem for folder in search_path(folders, "clusters") for path in folder.glob("*.yaml")})


def installed_backends() -> "dict[str, EntryPoint]":
    """Schedulers that installed packages add, by name. Reads the metadata of all packages: some milliseconds."""
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=BACKEND_ENTRY_POINTS)}
