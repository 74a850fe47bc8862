"""Paths that a job names, looked at on the cluster's machine in one round trip, and judged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmctl.context import Context
from llmctl.paths import UserFolders
from llmctl.runs.record import RunRecord
from llmctl.site.container import on_host
from llmctl.site.profile import ClusterProfile
from llmctl.submit.origins import Problem, profile_error
from llmctl.transport.file_writes import PathFacts
from llmctl.transport.protocol import Transport


@dataclass(frozen=True)
class PathCheck:
    """Paths to look at, and their judge: from the facts by path, the problem; None if all is as it should be."""

    paths: tuple[str, ...]
    judge: Callable[[Mapping[str, PathFacts]], Problem | None]


def path_problems(checks: Sequence[PathCheck], transport: Transport) -> list[Problem]:
    """Look at all paths in one round trip; returns the problems, in the order of the checks.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    paths = list(dict.fromkeys([path for check in checks for path in check.paths]))
    facts = dict(zip(paths, transport.look_at(paths), strict=True))
    return [problem for check in checks if (problem := check.judge(facts)) is not None]


def present(key: str, paths: Sequence[str], remedy: str, mounts: Sequence[str], *, kinds: Sequence[str]) -> PathCheck:
    """Paths that have to be there.

    Args:
        key: of the config.
        paths: as the job sees them.
        remedy: what to do where one is not there.
        mounts: of the job's container.
        kinds: ``file`` or ``folder``, or both.
    """
    places = {on_host(path, mounts) or path: path for path in paths}

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        missing = next((path for place, path in places.items() if facts[place].kind not in kinds), None)
        return None if missing is None else Problem(key, f"there is no {missing}; {remedy}")

    return PathCheck(tuple(places), judge)


def writable(key: str, path: str, mounts: Sequence[str]) -> PathCheck:
    """A folder that is written, and made with its parents where it is not there."""
    place = on_host(path, mounts) or path

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        why = why_unwritable(place, facts[place])
        return Problem(key, f"{path} cannot be written: {why}; name another, or leave it out") if why else None

    return PathCheck((place,), judge)


def new_run(run_dir: str, run_id: str) -> PathCheck:
    """A --run-id is not taken."""

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        if not facts[run_dir].kind:
            return None
        return Problem(
            f"--run-id {run_id}", f"{run_dir} is there already; a run id is used once, leave the flag out", of="flag"
        )

    return PathCheck((run_dir,), judge)


def trainer_snapshot(record: RunRecord) -> PathCheck:
    """The snapshot of the trainer that a run began with, and goes on with, is still there."""
    code = f"{record.run_dir}/code/trainer"

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        if record.code.get("trainer") is None or facts[code].kind == "folder":
            return None
        remedy = "submit its command anew"
        if record.config is not None:
            remedy = f"llmctl submit {record.run_dir}/config.yaml --set checkpoint.load={record.run_dir}/checkpoints"
        return Problem("", f"{code}: the snapshot of the trainer that the run began with is gone\n{remedy}", of="run")

    return PathCheck((code,), judge)


def runs_root_name_problems(profile: ClusterProfile, folders: UserFolders) -> list[Problem]:
    """A letter in the name of the folder of the runs that PYTHONPATH and hostfiles cannot carry."""
    wrong = next((letter for letter in profile.runs_root or "" if letter == ":" or ord(letter) < 32), None)
    if wrong is None:
        return []
    return [runs_root_problem(profile, folders, f"PYTHONPATH and hostfiles cannot carry {wrong!r}; name another")]


def runs_root_path(profile: ClusterProfile, folders: UserFolders) -> PathCheck:
    """The folder of the runs can be made and written."""
    root = profile.runs_root or ""

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        why = why_unwritable(root, facts[root])
        return runs_root_problem(profile, folders, why) if why else None

    return PathCheck((root,), judge)


def runs_root_problem(profile: ClusterProfile, folders: UserFolders, why: str) -> Problem:
    """The problem of a folder that cannot hold the runs."""
    remedy = f"set LLMCTL_RUNS_ROOT, or runs_root in {folders.clusters / profile.name}.yaml"
    return Problem("runs_root", f"{profile.runs_root} cannot hold the runs: {why}\n{remedy}", of="profile")


def check_runs_root(profile: ClusterProfile, context: Context) -> None:
    """Refuse a folder for the runs that cannot be made or written.

    Raises:
        ProfileError: names the folder, what is wrong with it, and where it is set.
        SchedulerError: the machine cannot be reached.
    """
    problems = runs_root_name_problems(profile, context.folders)
    if not problems:
        problems = path_problems([runs_root_path(profile, context.folders)], context.connect(profile))
    if problems:
        raise profile_error(context, profile, problems)


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
