"""Paths of a profile on the cluster's machine: ``~`` is the home directory there, ``$SCRATCH`` a variable there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from llmctl.errors import ProfileError

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile


class Machine(Protocol):
    """Part of a Transport that knows what paths stand for."""

    @property
    def host(self) -> str:
        """See Transport."""

    def home(self) -> str:
        """See Transport."""

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """See Transport."""


def expand(path: str, machine: Machine) -> str:
    """Replace a leading ``~`` and the variables of a path. Asks the machine only if the path has one of them.

    Raises:
        ProfileError: a variable is not set there.
        SchedulerError: the machine does not answer.
    """
    if "$" in path:
        from trainer.config.paths.variables import names_in, unset_problem, variables_in, with_variables

        path = with_variables(path, machine.variables(variables_in(path)))
        if left := names_in(path):
            raise ProfileError(unset_problem(left, machine.host))
    return machine.home() + path[1:] if path == "~" or path.startswith("~/") else path


def with_paths(profile: ClusterProfile, machine: Machine) -> ClusterProfile:
    """The profile with its paths expanded, apart from runs_root.

    Raises:
        ProfileError: names the key and the variable that is not set.
        SchedulerError: the machine does not answer.
    """

    def at(key: str, path: str | None) -> str | None:
        try:
            return path if path is None else expand(path, machine)
        except ProfileError as error:
            raise ProfileError(f"cluster {profile.name}: {key}: {error.message}") from None

    software, container = profile.environment, profile.container
    mounts = tuple(
        ":".join(str(at("container.mounts", part)) for part in mount.split(":")) for mount in container.mounts
    )
    paths = {name: at(f"environment.{name}", getattr(software, name)) for name in ("path", "python", "module_init")}
    places = {name: at(f"container.{name}", getattr(container, name)) for name in ("image_folder", "save")}
    return profile.model_copy(
        update={
            "environment": software.model_copy(update=paths),
            "container": container.model_copy(update={**places, "mounts": mounts}),
        }
    )
