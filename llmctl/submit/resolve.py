"""Merge of the layers of values, each value with its origin.

The layers are the profile, the config file, the environment and the flags; the values become a training config and a
JobSpec.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, UsageError
from llmctl.paths import expand_home
from llmctl.runs.record import RunRecord, newer_record
from llmctl.site.job import JobError, JobSpec, parse_time
from llmctl.site.profile import overlay
from llmctl.submit.job import ConfigFile, Flag, Problem
from llmctl.submit.origins import Origin, ProfileOrigins, Resolved

if TYPE_CHECKING:
    from pydantic import ValidationError

    from llmctl.transport.protocol import Transport
    from trainer.config.sections.job import JobConfig


def parse_settings(settings: Sequence[str] | Mapping[str, Any]) -> list[Flag]:
    """Values of ``--set key=value``, the value read as YAML; or values by dotted key, as they are.

    Raises:
        UsageError: no ``=``, or the value is not YAML.
    """
    if not settings:
        return []
    if isinstance(settings, Mapping):
        return [Flag("--set", str(key), value) for key, value in settings.items()]
    import yaml

    found = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {setting}: give key=value, as in --set training.train_iters=1000")
        if key.strip() == "job.time":  # YAML 1.1 reads 1:30:00 as the number 5400
            found.append(Flag("--set", "job.time", text.strip()))
            continue
        try:
            found.append(Flag("--set", key.strip(), yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))))
        except (RecursionError, ValueError) as error:
            raise UsageError(f"--set {key.strip()}: the value cannot be read: {str(error).partition(';')[0]}") from None
        except yaml.YAMLError as error:
            raise UsageError(f"--set {key.strip()}: {text!r} is not YAML: {' '.join(str(error).split())}") from None
    return found


def resolve(
    context: Context,
    session: ClusterSession,
    config: ConfigFile | None,
    flags: Sequence[Flag],
    *,
    job_only: bool,
) -> Resolved:
    """Merge all layers. Paths become those of the cluster's machine; the merged values are not checked otherwise.

    Relative paths are relative to the folder of their file, or for flags to the working directory. On a remote cluster
    they stay unchanged, except ``job.code``, which is read here. Variables have their values in a login shell there.

    Args:
        context: environment, working directory and folders.
        session: of the cluster; its profile gives the group.
        config: the config file, read; None for a COMMAND without one.
        flags: of the command line; the last flag wins.
        job_only: read only the ``job`` section, for a COMMAND.

    Raises:
        UsageError: a flag sets a key below a plain value, or a path with a variable that is not set there.
        ConfigFileError: a file sets such a path.
        SchedulerError: the machine does not answer.
    """
    profile, transport = session.profile, session.transport
    layers = _Layers(context, transport)
    if profile.group is not None:
        layers.add("job.group", profile.group, Origin("profile"), context.cwd)
    for key, value in context.user_settings().items():
        if key != "cluster":
            layers.add(f"job.{key}", value, Origin(str(context.folders.config_file)), context.cwd)
    if config is not None:
        for section, values in config.sections.items():
            if not job_only or section == "job":
                layers.add(section, values, Origin(config.shown), config.path.parent)
    if context.environment.get("LLMCTL_GROUP"):
        layers.add("job.group", context.environment["LLMCTL_GROUP"], Origin("LLMCTL_GROUP"), context.cwd)
    below = dict(layers.values)
    for given in flags:
        if job_only and not given.key.startswith("job."):
            raise UsageError(f"{given.flag} {given.key}: a COMMAND has no training config; only job.* can be set")
        value = [*layers.listed(given.key), *given.value] if given.adds else given.value
        layers.add(given.key, value, Origin(given.flag, is_flag=True), context.cwd)
    source = config.shown if config is not None else "the command line"
    resolved = Resolved(
        layers.values, layers.origins, source, ProfileOrigins(context, profile), below, layers.hub_names
    )
    layers.check_variables(resolved)
    return resolved


def job_section(resolved: Resolved) -> "JobConfig":
    """The job section alone, for a COMMAND.

    Raises:
        UsageError, ConfigFileError: names each key and its flag or file.
    """
    from pydantic import ValidationError

    from trainer.config.sections.job import JobConfig

    try:
        return JobConfig.model_validate(resolved.values.get("job", {}))
    except ValidationError as error:
        raise resolved.error(_section_problems(error)) from None


def job_spec(resolved: Resolved, section: "JobConfig", default_name: str, **more: Any) -> JobSpec:
    """The job that a ``job`` section asks for.

    Args:
        resolved: origins of the values.
        section: the values.
        default_name: the run's name if the section has no name.
        more: ``after``, ``command`` and ``torchrun``, which no config contains.

    Raises:
        UsageError, ConfigFileError: names the key and its flag or file.
    """
    values = section.model_dump(exclude={"name", "time"})
    try:
        time_s = parse_time(section.time) if section.time is not None else None
        return JobSpec.from_plain({**values, "name": section.name or default_name, "time_s": time_s, **more})
    except JobError as error:
        raise resolved.error([Problem(f"job.{error.key}", error.problem)]) from None


def recorded_job_spec(record: RunRecord) -> JobSpec:
    """The job of a run's last submission.

    Raises:
        RecordError: the record has keys of a newer llmctl, or invalid values.
    """
    if unknown := sorted(record.job.keys() - JobSpec.__dataclass_fields__.keys()):
        raise newer_record(record.run_dir, [f"job.{key}" for key in unknown], record.llmctl_version)
    try:
        return JobSpec.from_plain(record.job)
    except (JobError, TypeError) as error:
        raise RecordError(f"{record.run_dir / 'run.json'}: job: {error}") from None


def _section_problems(error: "ValidationError") -> Iterator[Problem]:
    """The problems of a job section.

    A misspelt key comes first: another key may be missing because of it.
    """
    from trainer.planning.build_config import unknown_key_problem

    for found in sorted(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden"):
        key = ".".join(str(part) for part in ("job", *found["loc"]))
        if found["type"] == "extra_forbidden":
            yield Problem(key, unknown_key_problem(key))
        elif key == "job":
            yield Problem("", "job: is not a mapping")
        else:
            message = str(found.get("ctx", {}).get("error") or found["msg"])
            yield Problem(key, f"{found['input']!r} is not valid: {message[:1].lower()}{message[1:]}")


class _Layers:
    """Values and origins while layers are merged.

    Earlier values are never changed in place.

    Attributes:
        values: of all layers so far.
        origins: see Resolved.
        unset: key -> sentence on the variables of its path that are not set.
        hub_names: see Resolved.
    """

    def __init__(self, context: Context, machine: "Transport") -> None:
        """Start without values; ``machine`` is the cluster's."""
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.unset: dict[str, str] = {}
        self.hub_names: dict[str, str] = {}
        self._context = context
        self._machine = machine

    def listed(self, key: str) -> list[Any]:
        """The list at a key of a section; empty without a list."""
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
                raise UsageError(f"{origin.text} {key}: {known} is a single value without keys below; set {known}")
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
        self.unset.pop(key, None)
        if key.startswith("job.") and key != "job.code" and "$" not in str(value):
            return value  # most values of a COMMAND, which then loads nothing on paths
        from trainer.config.paths.variables import HUB_KEYS, PATH_KEYS, has_variables

        if "$" in str(value) and has_variables(key, value):
            value = self._with_variables(key, value)
        if key not in PATH_KEYS:
            return value
        self.hub_names.pop(key, None)
        if key in HUB_KEYS and isinstance(value, str) and _is_hub_name(value):
            self.hub_names[key] = value
        weights: Sequence[int] = ()
        if key.endswith("data_path"):
            value, weights = _entries(value)
        if isinstance(value, list):
            return [
                entry if place in weights else self._absolute_path(key, entry, base)
                for place, entry in enumerate(value)
            ]
        return self._absolute_path(key, value, base)

    def check_variables(self, resolved: Resolved) -> None:
        """Refuse the paths with a variable that is not set.

        Raises:
            UsageError, ConfigFileError: names each key and its flag or file.
        """
        if self.unset:
            raise resolved.error(Problem(key, problem) for key, problem in self.unset.items())

    def _with_variables(self, key: str, value: Any) -> Any:
        """The value with the variables of this machine for code, else of the cluster's."""
        from trainer.config.paths.variables import names_in, unset_problem, variables_in, with_variables

        machine = self._context.transport if key == "job.code" else self._machine
        value = with_variables(value, machine.variables(variables_in(value)))
        if left := names_in(value):
            self.unset[key] = unset_problem(left, machine.host)
        return value

    def _absolute_path(self, key: str, value: Any, base: Path) -> Any:
        if not isinstance(value, str) or not value:
            return value
        if key == "evaluation.tasks" and _is_harness_task(value):
            return value
        if self._machine.is_remote and key != "job.code":  # code is read here and sent
            is_home = value == "~" or value.startswith("~/")
            path = self._machine.home() + value[1:] if is_home else value
            return os.path.normpath(path) if path.startswith("/") else path
        path = os.path.normpath(base / expand_home(value, self._context.folders))
        # A trailing slash or /. asks for the content of a folder instead of the folder (snapshot.find_user_code).
        return f"{path}/." if key == "job.code" and (value == "." or value.endswith(("/", "/."))) else path


def _entries(value: Any) -> tuple[Any, Sequence[int]]:
    """Entries of a data path, and the places of the weights among them."""
    from trainer.config.blends import path_entries, weight_places

    entries = path_entries(value)
    if isinstance(entries, list) and len(entries) > 1:
        value = entries
    are_texts = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    return value, weight_places(value) if are_texts else ()


def _is_hub_name(value: str) -> bool:
    from trainer.config.paths.hub_names import is_hub_name

    return is_hub_name(value)


def _is_harness_task(value: str) -> bool:
    from trainer.config.paths.task_files import is_task_file

    return not is_task_file(value)
