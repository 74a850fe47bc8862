"""ClusterProfile: what one site offers: one clusters/NAME.yaml, and the user's overlay of the same name over it."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from llmctl.backends import MODULES
from llmctl.errors import ProfileError, UsageError
from llmctl.job import VARIABLE
from llmctl.profile_names import ARGUMENT, cluster_names, profile_files
from llmctl.resources import UserFolders


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class EnvironmentProfile(_Part):
    """The Python environment that jobs run in."""

    modules: tuple[str, ...] = ()
    """Environment modules to load, in order."""
    kind: Literal["venv", "conda"] | None = None
    path: str | None = None
    """Folder of the virtual or conda environment."""
    python: str | None = None
    """The interpreter. Unset: the environment's own; on this machine without an environment, llmctl's."""
    setup: tuple[str, ...] = ()
    """Shell lines, taken as they are, run after the modules are loaded and before the environment is activated."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind is None) != (self.path is None):
            raise ValueError("kind and path go together: set both or neither")
        return self


class RendezvousProfile(_Part):
    """Where the ranks of a job meet."""

    ports: tuple[int, int] = (20000, 29999)
    """First and last port to try. Below Linux's ephemeral ports, so that no client socket sits there."""

    @field_validator("ports")
    @classmethod
    def _check_range(cls, ports: tuple[int, int]) -> tuple[int, int]:
        if not 0 < ports[0] <= ports[1] < 65536:
            raise ValueError("give the first and the last port, from 1 to 65535, as in [20000, 29999]")
        return ports


class ClusterProfile(_Part):
    """What one site offers, checked at birth."""

    name: str
    """Name of the file; stands in no file."""
    description: str = ""
    scheduler: str
    runs_root: str = Field(min_length=1)
    """Folder that holds the run directories. ``~`` is the home directory."""
    group: str | None = None
    """What the site bills to."""
    environment: EnvironmentProfile = EnvironmentProfile()
    rendezvous: RendezvousProfile = RendezvousProfile()
    env: dict[str, str] = {}
    """Variables that every job gets."""
    stop_grace_s: int = Field(120, gt=0)
    """Seconds that a run gets to save once it has been told to stop."""

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, scheduler: str) -> str:
        if scheduler not in MODULES:
            raise ValueError(f"the schedulers are {', '.join(MODULES)}")
        return scheduler

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        wrong = next((name for name in env if not VARIABLE.fullmatch(name)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} cannot be the name of a variable")
        return env


def load_profile(folders: UserFolders, name: str, origin: str = "--cluster") -> ClusterProfile:
    """The profile called ``name``, with the user's overlay.

    Args:
        folders: where the user's files are.
        name: as the file is called, without .yaml.
        origin: where the name came from, for the message: a flag, which begins with a dash, ARGUMENT, or a place.

    Raises:
        UsageError: a flag or argument names a cluster that has no profile; lists those that have one.
        ProfileError: the same from elsewhere, or a file holds what cannot be used: says file, key and what is valid.
    """
    files = profile_files(folders, name)
    if not files:
        problem = f"{origin}: no cluster is called {name!r}; there are {', '.join(cluster_names(folders))}"
        raise (UsageError if origin.startswith("-") or origin == ARGUMENT else ProfileError)(
            f"{problem}\nllmctl clusters new makes another"
        )
    values: dict[str, Any] = {}
    owner: dict[str, Path] = {}
    for path in files:
        layer = read_layer(path)
        owner.update(dict.fromkeys(_dotted(layer), path))
        values = overlay(values, layer)
    try:
        return ClusterProfile(**{**values, "name": name})
    except ValidationError as error:
        raise _profile_error(error, owner, files[-1]) from None


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``: mappings merge key by key, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def expand_home(path: str, folders: UserFolders) -> Path:
    """``path`` with a leading ``~`` replaced by the home directory."""
    return folders.home / path[2:] if path.startswith("~/") else folders.home if path == "~" else Path(path)


def read_layer(path: Path) -> dict[str, Any]:
    """The mapping in a profile's, overlay's or user's config file, unchecked.

    Raises:
        ProfileError: it cannot be read or is no mapping; names the file.
    """
    from trainer.config import ConfigError, read_yaml

    try:
        values = read_yaml(path)
    except ConfigError as error:
        raise ProfileError(f"{path}: {error.problem}") from None
    if "name" in values:
        raise ProfileError(f"{path}: name: a profile is called what its file is called; remove the key")
    return values


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def _known_keys() -> list[str]:
    keys = []
    for key, field in ClusterProfile.model_fields.items():
        keys.append(key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Part):
            keys += [f"{key}.{inner}" for inner in field.annotation.model_fields]
    return [key for key in keys if key != "name"]


def _profile_error(error: ValidationError, owner: Mapping[str, Path], fallback: Path) -> ProfileError:
    # A misspelt key comes first: it may be why another one is missing.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    file = next((owner[known] for known in (key, key.rpartition(".")[0]) if known in owner), fallback)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _known_keys(), n=1, cutoff=0.5)
        what = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_known_keys())}"
        return ProfileError(f"{file}: {key}: unknown key; {what}")
    if first["type"] == "missing":
        return ProfileError(f"{file}: {key}: is missing and has no default; set it")
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if cause else first["msg"][:1].lower() + first["msg"][1:]
    return ProfileError(f"{file}: {key}: {first['input']!r} is not valid: {message}")
