"""``clusters setup``: what a user answers, as changes of their overlay, checked as the profile that they will make."""

import getpass
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import ProfileError, SchedulerError
from llmctl.paths import UserFolders, profile_files
from llmctl.site.overlay_file import edited
from llmctl.site.profile import ClusterProfile, profile_of, read_layer
from llmctl.transport.file_writes import FileWrite, write_files

if TYPE_CHECKING:
    from llmctl.site.overlay_file import Changes

_HEADER = (
    "# Your own values for {name}, laid over the bundled profile: `llmctl clusters show {name}` says what holds.\n"
)


@dataclass(frozen=True)
class Answers:
    """What is known about one user on one cluster; None is not answered, and stays as it is.

    Attributes:
        login: the login node as ssh knows it; empty: this machine is one.
        group: what the site bills to.
        runs_root: folder of the runs.
        kind: venv, conda or container.
        path: the environment's folder, or the image.
        python: the interpreter.
        modules: environment modules.
        interface: network interface that the ranks meet at.
        hosts: machines of a cluster without a scheduler.
    """

    login: str | None = None
    group: str | None = None
    runs_root: str | None = None
    kind: str | None = None
    path: str | None = None
    python: str | None = None
    modules: tuple[str, ...] | None = None
    interface: str | None = None
    hosts: tuple[str, ...] | None = None

    def changes(self) -> "Changes":
        """The answers as paths of keys in an overlay."""
        plain = {
            ("login", "host"): None if self.login == "" else self.login,
            ("hosts",): self.hosts and list(self.hosts),
            ("group",): self.group,
            ("runs_root",): self.runs_root,
            ("environment", "modules"): None if self.modules is None else list(self.modules),
            ("environment", "kind"): self.kind,
            ("environment", "path"): self.path,
            ("environment", "python"): self.python,
            ("rendezvous", "interface"): self.interface,
        }
        return {path: value for path, value in plain.items() if value is not None}


def bundled_login(profile: ClusterProfile, answers: Answers) -> dict[tuple[str, ...], None]:
    """Takes the login host away again where the answer is that this machine is a login node."""
    return {("login", "host"): None} if answers.login == "" and profile.login.host is not None else {}


def suggested_runs_root(profile: ClusterProfile, *, group: str | None, user: str) -> str | None:
    """Where runs belong, by the profile's work_area; None if it names none, or the group is not known.

    Args:
        profile: of the cluster.
        group: what the site bills to.
        user: the user's name there.
    """
    area = profile.work_area
    if area is None or ("{group}" in area and not group):
        return None
    try:
        return area.format(group=group, user=user)
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ProfileError(
            f"clusters/{profile.name}.yaml: work_area: {area!r} is not valid: {{group}} and {{user}} can be filled in"
        ) from None


def user_on(host: str | None, environment: Mapping[str, str]) -> str:
    """The user's name on a host, as ssh knows it; on this machine without one. Connects to nothing.

    Args:
        host: as the ssh command knows it.
        environment: of this process.
    """
    if host:
        from llmctl.transport.ssh.ssh_config import resolve

        with suppress(SchedulerError):
            return resolve(host, environment).user
    return environment.get("LOGNAME") or getpass.getuser()


def below_home(path: str, folders: UserFolders) -> str:
    """``~/x`` for a path below our own home: the shell has put that in, and a cluster's home may be elsewhere."""
    home = str(folders.home)
    return f"~{path[len(home) :]}" if path == home or path.startswith(f"{home}/") else path


def write_overlay(folders: UserFolders, name: str, answers: Answers) -> Path | None:
    """Write or change the user's overlay of a cluster, whole or not at all, once it is known to load.

    Returns:
        The file; None if all of it holds already, and nothing was written.

    Raises:
        ProfileError: the values are not valid, or the file is one that cannot be changed; nothing is written.
    """
    path = folders.clusters / f"{name}.yaml"
    text = _text_of(path)
    layers = [(file, read_layer(file)) for file in profile_files(folders, name)]
    profile = profile_of(name, layers)
    changes = {**bundled_login(profile, answers), **answers.changes()}
    # What the bundled profile says is not repeated: it would stay when that changes.
    held = profile.model_dump(mode="json")
    changes = {place: value for place, value in changes.items() if _at(held, place) != value}
    if not changes:
        return None
    new = edited(str(path), text or _HEADER.format(name=name), changes)
    _check(folders, name, path, new)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file that a link leads to, so that a link into a folder of dotfiles stays one.
        write_files([FileWrite(str(path.resolve()), new.encode(), 0o644)])
    except OSError as error:
        raise ProfileError(f"{error.filename or path}: cannot be written: {error.strerror}") from None
    return path


def _at(values: Mapping[str, Any], place: tuple[str, ...]) -> Any:
    for key in place:
        values = values[key]
    return values


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from None


def _check(folders: UserFolders, name: str, path: Path, text: str) -> None:
    import yaml

    below = [file for file in profile_files(folders, name) if file != path]
    profile_of(name, [*((file, read_layer(file)) for file in below), (path, yaml.safe_load(text) or {})])
