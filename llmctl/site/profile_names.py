"""Names of clusters, and of schedulers from installed packages. Reads no profile."""

from typing import TYPE_CHECKING

from llmctl.paths import UserFolders, search_path

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ARGUMENT = "NAME"
"""Metavar of commands that take a cluster as an argument."""
BACKEND_ENTRY_POINTS = "llmctl.backends"
"""Entry point group with which an installed package adds a scheduler, as ``flux = "package.module:BACKEND"``."""


def cluster_names(folders: UserFolders) -> list[str]:
    """Names of all clusters with a profile, sorted."""
    return sorted({path.stem for folder in search_path(folders, "clusters") for path in folder.glob("*.yaml")})


def installed_backends() -> "dict[str, EntryPoint]":
    """Schedulers of installed packages, by name. Reads the metadata of all packages: some milliseconds."""
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=BACKEND_ENTRY_POINTS)}
