"""Errors of a profile that does not exist, or whose values are not valid."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from llmctl.errors import ProfileError, UsageError
from llmctl.paths import UserFolders
from llmctl.site.profile_names import ARGUMENT, cluster_names


def unknown_cluster(folders: UserFolders, name: str, origin: str) -> UsageError | ProfileError:
    """The error of a name without a profile, with the nearest name.

    Args:
        folders: where the user's files are.
        name: name of no profile.
        origin: source of the name, see ``load_profile``.
    """
    near = difflib.get_close_matches(name, cluster_names(folders), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    problem = f"{origin}: no cluster is called {name!r}; {hint}`llmctl clusters list` shows all"
    return (UsageError if origin.startswith("-") or origin == ARGUMENT else ProfileError)(problem)


def profile_problem(
    error: ValidationError, layers: Sequence[tuple[Path, Mapping[str, Any]]], kind: type[BaseModel]
) -> ProfileError:
    """The first problem of a profile, with its file and key.

    Args:
        error: of the profile's construction.
        layers: files with their values, in order. The last one that sets a key is named, else the last of all.
        kind: the class that refused the values.
    """
    owner = {key: path for path, layer in layers for key in _dotted(layer)}
    # A misspelt key comes first: it may be the reason why another key is missing.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    file = next((owner[known] for known in (key, key.rpartition(".")[0]) if known in owner), layers[-1][0])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _known_keys(kind), n=1, cutoff=0.5)
        what = (
            f"did you mean {near[0]}?" if near else "clusters/slurm.yaml, which comes with llmctl, explains every key"
        )
        return ProfileError(f"{file}: {key}: unknown key; {what}")
    if first["type"] == "missing":
        return ProfileError(f"{file}: {key}: is missing and has no default; set it")
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if cause else first["msg"][:1].lower() + first["msg"][1:]
    return ProfileError(f"{file}: {key}: {first['input']!r} is not valid: {message}")


def _known_keys(kind: type[BaseModel]) -> list[str]:
    keys = []
    for key, field in kind.model_fields.items():
        keys.append(key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{key}.{inner}" for inner in field.annotation.model_fields]
    return [key for key in keys if key != "name"]


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys
