"""Names of clusters, by their files alone. No profile is read."""

from llmctl.paths import UserFolders, search_path

ARGUMENT = "NAME"
"""What the commands that take a cluster as an argument call it."""


def cluster_names(folders: UserFolders) -> list[str]:
    """Every cluster that there is a profile for, sorted."""
    return sorted({path.stem for folder in search_path(folders, "clusters") for path in folder.glob("*.yaml")})
