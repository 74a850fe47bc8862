"""Paths that a job names, looked at on the cluster's machine before anything is queued: all of them in one call."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.context import Context
from llmctl.errors import LlmctlError, ProfileError, UsageError
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.site.profile_names import profile_files
from llmctl.submit.container_checks import on_host
from llmctl.submit.resolve import Resolved
from llmctl.transport.file_writes import PathFacts
from llmctl.transport.protocol import Transport

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_DATA_KEYS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclass(frozen=True)
class PathCheck:
    """One path, and what is said about it: an error, or None if it is as it should be."""

    path: str
    judge: Callable[[PathFacts], LlmctlError | None]


def run_path_checks(checks: Sequence[PathCheck], transport: Transport) -> None:
    """Look at all paths in one round trip.

    Raises:
        LlmctlError: the first that is not as it should be.
        SchedulerError: the machine cannot be reached.
    """
    facts = transport.look_at([check.path for check in checks])
    for check, seen in zip(checks, facts, strict=True):
        problem = check.judge(seen)
        if problem is not None:
            raise problem


def config_checks(
    resolved: Resolved, config: "TrainConfig", job: JobSpec, profile: ClusterProfile
) -> Iterator[PathCheck]:
    """Data, tokenizer and checkpoint must be there; folders that are written must be writable.

    Raises:
        UsageError, ConfigFileError: no data is named, or a path is relative where nothing tells to what.
    """
    data, mounts = config.data, (*profile.container.mounts, *job.mounts)
    if not (data.data_path or data.train_data_path or data.mock_data):
        raise resolved.refusal(
            "data.data_path",
            "is unset: give the prefix of a .bin/.idx pair, which `llmctl data prepare` makes from text, "
            "or set data.mock_data=true",
        )
    yield from _data_checks(resolved, config, mounts)
    named = [(f"data.{key}", getattr(data, key)) for key in ("tokenizer_model", "vocab_file", "merge_file")]
    for key, place in (*named, ("checkpoint.load", config.checkpoint.load)):
        if place is not None:
            yield _present(resolved, key, place, "name one that is there, or leave it out", mounts)
    for key, place in (("checkpoint.save", config.checkpoint.save), ("data.data_cache_path", data.data_cache_path)):
        if place is not None:
            yield _writable(resolved, key, place, mounts)


def _data_checks(resolved: Resolved, config: "TrainConfig", mounts: Sequence[str]) -> Iterator[PathCheck]:
    pair = "name the prefix of a .bin/.idx pair, which `llmctl data prepare` makes from text"
    for key in _DATA_KEYS:
        for part in config.data.blend(key):
            if not config.data.streaming:
                for end in (".bin", ".idx"):
                    yield _present(resolved, f"data.{key}", f"{part.prefix}{end}", pair, mounts, "file")
            # What a pattern matches there is not looked for.
            elif not set("*?[") & set(part.prefix):
                yield _present(resolved, f"data.{key}", part.prefix, "name a file or folder of text", mounts)


def runs_root_check(profile: ClusterProfile, context: Context) -> PathCheck:
    """The folder of the runs can be made and written.

    Raises:
        ProfileError: its name holds what PYTHONPATH and hostfiles cannot carry.
    """
    root = profile.runs_root or ""
    wrong = next((letter for letter in root if letter == ":" or ord(letter) < 32), None)
    if wrong is not None:
        raise runs_root_error(profile, context, f"PYTHONPATH and hostfiles cannot carry {wrong!r}; name another")

    def judge(facts: PathFacts) -> LlmctlError | None:
        problem = why_unwritable(root, facts)
        return runs_root_error(profile, context, problem) if problem else None

    return PathCheck(root, judge)


def check_runs_root(profile: ClusterProfile, context: Context) -> None:
    """Refuse a folder for the runs that cannot be made or written.

    Raises:
        ProfileError: names the folder, what is wrong with it, and where it is set.
        SchedulerError: the machine cannot be reached.
    """
    run_path_checks([runs_root_check(profile, context)], context.connect(profile))


def new_run_check(run_dir: str, run_id: str) -> PathCheck:
    """A --run-id is not taken."""

    def judge(facts: PathFacts) -> LlmctlError | None:
        if not facts.kind:
            return None
        return UsageError(f"--run-id {run_id}: {run_dir} is there already; a run id is used once, leave the flag out")

    return PathCheck(run_dir, judge)


def image_check(resolved: Resolved, image: str) -> PathCheck:
    """The file of an image is there.

    Raises:
        UsageError, ConfigFileError: it is relative where nothing tells to what.
    """
    return _present(resolved, "job.container", image, "name one that is there, or an image of a registry", ())


def why_unwritable(folder: str, facts: PathFacts) -> str:
    """Why a folder, to be made with its parents where it is not there, cannot be written; empty if it can."""
    if facts.nearest_kind != "folder":
        return f"{facts.nearest} is not a folder"
    if not facts.can_write:
        return f"{facts.nearest} is not writable for you"
    if facts.is_read_only:
        return f"{facts.nearest} is on a file system mounted read-only"
    if facts.nearest != folder and facts.nearest.startswith(("/proc", "/sys")):
        return f"{facts.nearest} is the kernel's and holds no files of yours"
    return ""


def runs_root_error(profile: ClusterProfile, context: Context, problem: str) -> ProfileError:
    """The refusal of runs_root, naming where its value came from and where to set another."""
    if context.environment.get("LLMCTL_RUNS_ROOT"):
        where = "LLMCTL_RUNS_ROOT"
    else:
        where = f"{profile_files(context.folders, profile.name)[-1]}: runs_root"
    remedy = f"set LLMCTL_RUNS_ROOT, or runs_root in {context.folders.clusters / profile.name}.yaml"
    return ProfileError(f"{where}: {profile.runs_root} cannot hold the runs: {problem}\n{remedy}")


def _present(
    resolved: Resolved, key: str, path: str, remedy: str, mounts: Sequence[str], kind: str | None = None
) -> PathCheck:
    _check_absolute(resolved, key, path)

    def judge(facts: PathFacts) -> LlmctlError | None:
        if facts.kind in (("file", "folder") if kind is None else (kind,)):
            return None
        return resolved.refusal(key, f"there is no {path}; {remedy}")

    return PathCheck(on_host(path, mounts) or path, judge)


def _writable(resolved: Resolved, key: str, path: str, mounts: Sequence[str]) -> PathCheck:
    _check_absolute(resolved, key, path)
    place = on_host(path, mounts) or path

    def judge(facts: PathFacts) -> LlmctlError | None:
        problem = why_unwritable(place, facts)
        if not problem:
            return None
        return resolved.refusal(key, f"{path} cannot be written: {problem}; name another, or leave it out")

    return PathCheck(place, judge)


def _check_absolute(resolved: Resolved, key: str, path: str) -> None:
    if not path.startswith("/"):
        raise resolved.refusal(
            key, f"{path} is relative, and the job runs on other machines; give a path there, beginning with / or ~/"
        )
