"""Layers of values, the later one over the earlier: profile, config file, environment, flags. Each knows its origin."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmctl.context import Context, expand, is_remote
from llmctl.errors import ConfigFileError, LlmctlError, UsageError
from llmctl.paths import UserFolders, bundled
from llmctl.site.profile import ClusterProfile, expand_home, overlay
from trainer.config.data_checks import path_entries, weight_places
from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config, read_yaml, unknown_key_problem

DEFAULT_CONFIG = "llmctl.yaml"
EXAMPLE = "gpt_small.yaml"

PATH_KEYS = frozenset(
    {
        "data.data_path",
        "data.train_data_path",
        "data.valid_data_path",
        "data.test_data_path",
        "data.tokenizer_model",
        "data.vocab_file",
        "data.merge_file",
        "data.data_cache_path",
        "checkpoint.save",
        "checkpoint.load",
        "job.code",
    }
)
"""Values that are paths: relative ones count from the folder of their file, or from where their flag is typed.

On a cluster that is reached by ssh they are that cluster's, and relative ones, but for ``job.code``, stay as they are.
"""


@dataclass(frozen=True)
class Origin:
    """Where a value came from: ``--nodes``, ``--set``, a file, LLMCTL_GROUP or ``profile``."""

    text: str
    is_flag: bool = False


@dataclass(frozen=True)
class Flag:
    """One value given on the command line: the flag as typed, the dotted key it sets, and the value.

    ``adds``: the value is a list, added to what the config file gives.
    """

    flag: str
    key: str
    value: Any
    adds: bool = False


@dataclass(frozen=True)
class Resolved:
    """The values of all layers together, nested as in a config file.

    Attributes:
        values: what build_config takes.
        origins: dotted key of every value given -> where it came from.
        source: the config file, or what stands in its place; names the culprit where a key has no origin.
        below_flags: the values without the command line's.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    source: str
    below_flags: Mapping[str, Any] = field(default_factory=dict)

    def origin(self, key: str) -> Origin | None:
        """Where a key's value came from, or that of what it stands in; None if it has its default."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return None

    def refusal(self, key: str, problem: str, *, also: Sequence[str] = ()) -> LlmctlError:
        """The error that says what is wrong with a key, by the flag or the file and key that it came from.

        Args:
            key: dotted key of the culprit; may be empty.
            problem: what is wrong, what is valid, what to do.
            also: further keys that the problem is about; a flag among them is to blame too.
        """
        origin = self.origin(key)
        if origin is not None and origin.is_flag:
            name = origin.text if origin.text != "--set" else f"--set {key}"
            return UsageError(f"{name}: {problem}")
        where = f"{origin.text if origin else self.source}: {key}: " if key else f"{self.source}: "
        others = [self._flag_name(name) for name in also]
        flags = [name for name in others if name] or self._flags_to_blame(key)
        if flags:
            return UsageError(f"{', '.join(flags)}: {where}{problem}")
        return ConfigFileError(f"{where}{problem}")

    def _flag_name(self, key: str) -> str:
        origin = self.origin(key)
        if origin is None or not origin.is_flag:
            return ""
        return f"--set {key}" if origin.text == "--set" else origin.text

    def _flags_to_blame(self, key: str) -> list[str]:
        """Flags, if the file was in order before they were laid over it."""
        given = sorted({self._flag_name(key) for key in self.origins} - {""})
        if not given or not key:
            return []
        try:
            build_config(self.below_flags)
        except ConfigError:
            return []
        return given


def find_config(context: Context, argument: str | None) -> tuple[Path, str]:
    """The config file meant, and a remark for the user where it was not named.

    Raises:
        UsageError: the file named is not there.
    """
    if argument is not None:
        path = context.cwd / expand_home(argument, context.folders)
        if not path.is_file():
            raise UsageError(f"CONFIG: there is no file {argument}; name one, or leave it out for the bundled example")
        return path, ""
    own = context.cwd / DEFAULT_CONFIG
    if own.is_file():
        return own, f"using ./{DEFAULT_CONFIG}"
    example = bundled("examples") / EXAMPLE
    if not example.is_file():
        raise UsageError(f"CONFIG: there is no ./{DEFAULT_CONFIG} and no bundled example; name a config file")
    return example, f"no CONFIG and no ./{DEFAULT_CONFIG}: using the bundled example {example}"


def parse_settings(settings: Sequence[str], flag: str = "--set") -> list[Flag]:
    """Values of ``key=value``, the value read as YAML.

    Raises:
        UsageError: no ``=``, or the value is not YAML.
    """
    import yaml

    found = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{flag} {setting}: give key=value, as in {flag} training.train_iters=1000")
        try:
            found.append(Flag(flag, key.strip(), yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))))
        except yaml.YAMLError as error:
            raise UsageError(f"{flag} {key.strip()}: {text!r} is not YAML: {' '.join(str(error).split())}") from None
    return found


def resolve(
    context: Context, profile: ClusterProfile, config: Path | None, flags: Sequence[Flag], *, job_only: bool
) -> Resolved:
    """All layers, laid over each other. Nothing is checked but that they can be.

    Args:
        context: environment, working directory and folders.
        profile: of the cluster; gives the group.
        config: the config file; None for a COMMAND without one.
        flags: of the command line, the last one wins.
        job_only: take nothing but the ``job`` section, as a COMMAND needs it.

    Raises:
        ConfigFileError: the file cannot be read.
        UsageError: a flag sets a key below a plain value.
    """
    layers = _Layers(context.folders, context.connect(profile).home if is_remote(profile) else None)
    if profile.group is not None:
        layers.add("job.group", profile.group, Origin("profile"), context.cwd)
    if config is not None:
        for section, values in _read(config).items():
            if not job_only or section == "job":
                layers.add(section, values, Origin(str(config)), config.parent)
    if context.environment.get("LLMCTL_GROUP"):
        layers.add("job.group", context.environment["LLMCTL_GROUP"], Origin("LLMCTL_GROUP"), context.cwd)
    below = dict(layers.values)
    for given in flags:
        if job_only and not given.key.startswith("job."):
            raise UsageError(f"{given.flag} {given.key}: a COMMAND has no training config; only job.* can be set")
        value = [*layers.listed(given.key), *given.value] if given.adds else given.value
        layers.add(given.key, value, Origin(given.flag, is_flag=True), context.cwd)
    return Resolved(layers.values, layers.origins, str(config or "the command line"), below)


def unknown_job_key(key: str) -> str:
    """One sentence for a key that the job section does not have."""
    return unknown_key_problem(f"job.{key}")


class _Layers:
    """Values and origins while layers are being laid over each other. Earlier values are never changed in place."""

    def __init__(self, folders: UserFolders, remote_home: Callable[[], str] | None) -> None:
        """``remote_home`` tells the home directory of the machine that the paths are on, if it is not this one."""
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self._folders = folders
        self._remote_home = remote_home

    def listed(self, key: str) -> list[Any]:
        """The list that stands under a key of a section; empty if there is none."""
        section, _, name = key.partition(".")
        values = self.values.get(section)
        there = values.get(name) if isinstance(values, Mapping) else None
        return there if isinstance(there, list) else []

    def add(self, key: str, value: Any, origin: Origin, base: Path) -> None:
        parts = key.split(".")
        under: Any = self.values
        for number, part in enumerate(parts[:-1]):
            under = under.get(part) if isinstance(under, Mapping) else None
            if under is not None and not isinstance(under, Mapping):
                known = ".".join(parts[: number + 1])
                raise UsageError(f"{origin.text} {key}: {known} is one value and has no keys below it; set {known}")
        nested = self._absolute(key, value, base)
        if isinstance(nested, Mapping):
            nested = {name: self._absolute(f"{key}.{name}", inner, base) for name, inner in nested.items()}
        self._note(key, nested, origin)
        for part in reversed(parts):
            nested = {part: nested}
        self.values = overlay(self.values, nested)

    def _note(self, key: str, value: Any, origin: Origin) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                self._note(f"{key}.{name}", inner, origin)
            return
        for old in [old for old in self.origins if old.startswith(f"{key}.")]:
            del self.origins[old]
        self.origins[key] = origin

    def _absolute(self, key: str, value: Any, base: Path) -> Any:
        if key not in PATH_KEYS:
            return value
        entries = path_entries(value) if key.endswith("data_path") else None
        if isinstance(entries, list) and len(entries) > 1:
            value = entries
        if isinstance(value, list):
            weights = weight_places(value) if all(isinstance(entry, str) for entry in value) else ()
            return [
                entry if place in weights else self._absolute(key, entry, base) for place, entry in enumerate(value)
            ]
        if not isinstance(value, str) or not value:
            return value
        if self._remote_home is not None and key != "job.code":  # code is read here and sent
            path = expand(value, self._remote_home)
            return os.path.normpath(path) if path.startswith("/") else path
        path = os.path.normpath(base / expand_home(value, self._folders))
        # A trailing slash or /. asks for the content of a folder instead of the folder (snapshot.find_user_code).
        return f"{path}/." if key == "job.code" and (value == "." or value.endswith(("/", "/."))) else path


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_yaml(path)
    except ConfigError as error:
        raise ConfigFileError(f"{path}: {error.problem}") from None
