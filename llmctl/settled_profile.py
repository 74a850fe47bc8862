"""A profile with its paths as they are on the cluster's machine: ``~`` is the home directory there."""

from collections.abc import Callable

from llmctl.context import Invocation, is_remote
from llmctl.site.profile import ClusterProfile


def settle_profile(profile: ClusterProfile, invocation: Invocation) -> ClusterProfile:
    """The profile without ``~`` in its paths. The machine is asked for its home only if one begins with it.

    Raises:
        ProfileError: runs_root is not set, or not absolute.
        SchedulerError: the machine cannot be asked.
    """
    root = invocation.runs_root(profile)

    def home() -> str:
        return invocation.connect(profile).home() if is_remote(profile) else str(invocation.folders.home)

    software, container = profile.environment, profile.container
    paths = {"path": software.path, "python": software.python, "module_init": software.module_init}
    mounts = tuple(":".join(expand(part, home) for part in mount.split(":")) for mount in container.mounts)
    places = {"image_folder": container.image_folder, "save": container.save}
    return profile.model_copy(
        update={
            "runs_root": root,
            "environment": software.model_copy(update=_expanded(paths, home)),
            "container": container.model_copy(update={**_expanded(places, home), "mounts": mounts}),
        }
    )


def expand(path: str, home: Callable[[], str]) -> str:
    """``path`` with a leading ``~`` replaced by the home directory, which is asked for only then."""
    return home() + path[1:] if path == "~" or path.startswith("~/") else path


def _expanded(paths: dict[str, str | None], home: Callable[[], str]) -> dict[str, str | None]:
    return {key: path if path is None else expand(path, home) for key, path in paths.items()}
