"""``clusters setup``: turn the user's answers into overlay changes, checked as the resulting profile."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import ProfileError
from llmctl.paths import UserFolders, profile_files
from llmctl.site.overlay_file import edited
from llmctl.site.profile import ClusterProfile, profile_of, read_layer
from llmctl.transport.file_writes import FileWrite, write_files

if TYPE_CHECKING:
    from llmctl.site.overlay_file import Changes

_HEADER = (
    "# Your own values for {name}, laid over the bundled profile. `llmctl clusters show {name}` prints the result.\n"
)


@dataclass(frozen=True)
class Answers:
    """One user's settings on one cluster; None leaves a setting unchanged.

    Attributes:
        login: the login node as ssh knows it; empty: this machine is a login node.
        group: group, project or account to bill.
        runs_root: folder of the run directories.
        kind: venv, conda or container.
        path: the environment's folder, or the image.
        python: the interpreter.
        modules: environment modules.
        interface: network interface for the rendezvous.
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
        """The answers as key paths of an overlay and their values."""
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
    """Unset the bundled login host if this machine is a login node."""
    return {("login", "host"): None} if answers.login == "" and profile.login.host is not None else {}


def below_home(path: str, folders: UserFolders) -> str:
    """``~/x`` for a path below our own home: the shell expanded ``~``, and the cluster's home may differ."""
    home = str(folders.home)
    return f"~{path[len(home) :]}" if path == home or path.startswith(f"{home}/") else path


def write_overlay(folders: UserFolders, name: str, answers: Answers) -> Path | None:
    """Write or change the user's overlay atomically, after checking the resulting profile.

    Returns:
        The file; None if nothing had to change.

    Raises:
        ProfileError: a value is invalid, or the file cannot be edited; nothing is written.
    """
    path = folders.clusters / f"{name}.yaml"
    text = _text_of(path)
    layers = [(file, read_layer(file)) for file in profile_files(folders, name)]
    profile = profile_of(name, layers)
    changes = {**bundled_login(profile, answers), **answers.changes()}
    # Values equal to the bundled profile are left out: a copy would hide later changes of the bundled profile.
    held = profile.model_dump(mode="json")
    changes = {place: value for place, value in changes.items() if _at(held, place) != value}
    if not changes:
        return None
    new = edited(str(path), text or _HEADER.format(name=name), changes)
    _check(folders, name, path, new)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Resolve a link and write its target, so that links into a folder of dotfiles survive.
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
