"""Values of a job with their origins, and errors that name the origin.

Nothing else turns problems into errors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmctl.context import Context
from llmctl.errors import ConfigFileError, LlmctlError, ProfileError, RecordError, UsageError
from llmctl.paths import profile_files
from llmctl.site.profile import ClusterProfile
from llmctl.submit.job import Problem

_PROFILE_KEYS = {
    "job.launcher": "launch.launcher",
    "job.priority": "defaults.priority",
    "job.queue": "defaults.queue",
    "job.resource_type": "defaults.resource_type",
    "job.time": "defaults.time",
    "job.container": "environment.path",
}
"""Key of the job -> key of the profile with the default."""
_IS_ABSENT = re.compile(r"^there is no |^\S+ is relative, ")
"""Beginning of a problem with a path that is not there."""


@dataclass(frozen=True)
class Origin:
    """Origin of a value: ``--nodes``, ``--set``, a file, LLMCTL_GROUP or ``profile``."""

    text: str
    is_flag: bool = False


@dataclass(frozen=True)
class ProfileOrigins:
    """Origins of the keys of a cluster's profile.

    Attributes:
        context: folders of the profiles, and LLMCTL_RUNS_ROOT.
        profile: of the cluster.
    """

    context: Context
    profile: ClusterProfile

    def message(self, key: str, text: str) -> str:
        """Error message about a key, with the cluster and the file that sets the key."""
        name, folders = self.profile.name, self.context.folders
        if key == "runs_root":
            from_variable = self.context.environment.get("LLMCTL_RUNS_ROOT")
            where = "LLMCTL_RUNS_ROOT" if from_variable else f"{profile_files(folders, name)[-1]}: {key}"
            return f"{where}: {text}"
        from llmctl.site.profile_origins import origins

        found = origins(folders, name)
        file = next((found[set_key] for set_key in found if set_key == key or set_key.startswith(f"{key}.")), None)
        first, newline, remedy = text.partition("\n")
        return f"cluster {name}: {key}: {first}{f' (set in {file})' if file else ''}{newline}{remedy}"

    def sets(self, key: str) -> bool:
        """True if the profile has a value for a dotted key."""
        value: Any = self.profile
        for part in key.split("."):
            value = getattr(value, part)
        return value is not None


@dataclass(frozen=True)
class Resolved:
    """The merged values of all layers, nested as in a config file.

    Attributes:
        values: input of build_config.
        origins: dotted key of every given value -> its origin.
        source: the config file, or "the command line"; named in messages about a key without an origin.
        cluster: origins of the profile's keys.
        below_flags: the values without the flags.
        hub_names: key -> its path as given, if this may be meant as a name of the Hugging Face Hub.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    source: str
    cluster: ProfileOrigins
    below_flags: Mapping[str, Any] = field(default_factory=dict)
    hub_names: Mapping[str, str] = field(default_factory=dict)

    def error(self, problems: Iterable[Problem]) -> LlmctlError:
        """One error for all problems, the first as the main sentence.

        The first decides the exit code; each other problem is one further line.

        Args:
            problems: at least one, the most basic first.
        """
        first, *others = [self._error(problem) for problem in dict.fromkeys(problems)]
        lines = dict.fromkeys(f"also: {'; '.join(error.message.splitlines())}" for error in others)
        return type(first)("\n".join((first.message, *lines)))

    def _error(self, problem: Problem) -> LlmctlError:
        if problem.of == "run":
            return RecordError(problem.text)
        if problem.of == "flag":
            return UsageError(f"{problem.key}: {problem.text}" if problem.key else problem.text)
        if problem.of == "profile":
            return ProfileError(self.cluster.message(problem.key, problem.text))
        return self._config_error(problem)

    def _config_error(self, problem: Problem) -> LlmctlError:
        """Error about a key of the config, by flag, file or profile."""
        key = problem.key
        if key in self.hub_names and _IS_ABSENT.search(problem.text):
            from trainer.config.paths.hub_names import hub_remedy

            problem = replace(problem, text=problem.text + hub_remedy(self.hub_names[key]))
        origin = self._origin(key)
        if origin is not None and origin.is_flag:
            return UsageError(f"{self._flag(key)}: {problem.text}")
        default = _PROFILE_KEYS.get(key, "")
        if origin is None and default and self.cluster.sets(default):
            error: LlmctlError = ProfileError(self.cluster.message(default, problem.text))
        else:
            where = f"{origin.text if origin else self.source}: {f'{key}: ' if key else ''}"
            error = ConfigFileError(f"{where}{problem.text}")
        flags = [flag for flag in map(self._flag, problem.also) if flag]
        if not flags and problem.between_keys and key:
            flags = self._flags_that_broke_the_file(of_job=key.startswith("job."))
        return UsageError(f"{', '.join(dict.fromkeys(flags))}: {error.message}") if flags else error

    def _origin(self, key: str) -> Origin | None:
        """Origin of a key's value, or of its section; None for a default."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return None

    def _flag(self, key: str) -> str:
        """The flag that set a key, as typed; empty without a flag."""
        origin = self._origin(key)
        if origin is None or not origin.is_flag:
            return ""
        return f"--set {key}" if origin.text == "--set" else origin.text

    def _flags_that_broke_the_file(self, *, of_job: bool) -> list[str]:
        """All flags of the job, or all others, if the config file is valid without flags; otherwise none."""
        from trainer.config.errors import ConfigError
        from trainer.planning.build_config import build_config

        try:
            build_config(self.below_flags)
        except ConfigError:
            return []
        return sorted({self._flag(key) for key in self.origins if key.startswith("job.") == of_job} - {""})


def profile_error(context: Context, profile: ClusterProfile, problems: Iterable[Problem]) -> LlmctlError:
    """Error for problems of a profile, without a job."""
    return Resolved({}, {}, "the command line", ProfileOrigins(context, profile)).error(problems)
