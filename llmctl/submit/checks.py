"""Checks of a job before anything is written, queued or started.

The checks compare the job with the cluster's profile. They take a job with every value decided, and yield problems.
Only ``check_job`` raises, once for all problems.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from llmctl.backends.base import QueueBackend
from llmctl.context import ClusterSession, Context
from llmctl.durations import clock
from llmctl.paths import UserFolders
from llmctl.site.profile import ClusterProfile, LimitsProfile, QueueLimits, ResourceType
from llmctl.submit.origins import Problem, Resolved, profile_error
from llmctl.submit.request import AskedJob, JobPlan
from llmctl.transport.file_writes import PathFacts
from llmctl.transport.protocol import Transport, transport_for

if TYPE_CHECKING:
    from llmctl.transport.host_group import HostGroup

MAX_LOCAL_NODES = 1024
"""Far above the useful number of ranks on one machine, and too low for a typo to exhaust its process table."""

_Limits = ResourceType | LimitsProfile | QueueLimits
_SIZE = ("job.nodes", "job.resource_type", "job.queue")
_LENGTH = ("job.time", *_SIZE)
_PLURALS = {
    "resource_type": "resource types",
    "queue": "queues",
    "reservation": "reservations",
    "priority": "priorities",
    "exclude": "way to leave out nodes",
    "after": "waiting jobs",
    "container": "containers",
    "mounts": "containers",
    "launcher": "launchers",
}
"""Key of the job that some schedulers do not support -> plural for messages."""


@dataclass(frozen=True)
class PathCheck:
    """Paths to inspect, and the function that judges their facts."""

    paths: tuple[str, ...]
    judge: Callable[[Mapping[str, PathFacts]], Problem | None]


def check_job(
    context: Context,
    session: ClusterSession,
    resolved: Resolved,
    job: JobPlan,
    own_paths: Sequence[PathCheck],
    *,
    dry_run: bool,
) -> list[str]:
    """Refuse a job with problems, reporting all of them at once; returns warnings.

    One round trip inspects all paths; up to three more recognise other programs' checkpoints, where the config names
    such a folder. Another machine is contacted only if the job has no other problem, and never for a dry run.

    Args:
        context: of this call.
        session: of the cluster.
        resolved: the job's values with their origins.
        job: with every value decided.
        own_paths: checks of the run's own paths.
        dry_run: inspect no path of another machine.

    Raises:
        UsageError, ConfigFileError, ProfileError, RecordError: lists all problems; the first decides the class.
        SchedulerError: the machine cannot be reached.
    """
    transport, profile = session.transport, job.profile
    problems = [*job_problems(job, context.environment), *python_problems(job)]
    problems += runs_root_name_problems(profile, context.folders)
    if job.is_remote and problems:
        raise resolved.error(problems)
    paths = [runs_root_path(profile, context.folders), *own_paths]
    if job.config is not None or job.request.container is not None:
        from llmctl.submit.config_checks import named_paths

        paths = [*named_paths(job), *paths]
    if dry_run and job.is_remote:
        unchecked = dict.fromkeys(path for check in paths for path in check.paths)
        return [*memory_warnings(job), f"not checked on {transport.host}: {', '.join(unchecked)}"]
    if job.is_remote:
        transport = transport_for(transport, job.request.hosts)
    if job.backend.capabilities.starts_on_hosts:
        from llmctl.submit.host_checks import check_hosts_answer

        check_hosts_answer(job, cast("HostGroup", session.transport))
    problems += path_problems(paths, transport)
    if job.config is not None and not problems:
        from llmctl.submit.foreign_checks import foreign_problems

        problems += foreign_problems(job, transport)
        if job.config.evaluation.tasks:
            from llmctl.submit.config_checks import task_file_problems

            problems += task_file_problems(job, transport)
    if problems:
        raise resolved.error(problems)
    return memory_warnings(job)


def memory_warnings(job: AskedJob) -> list[str]:
    """Warning about a training run that probably does not fit into its devices; see llmctl.submit.memory_check."""
    if job.config is None:
        return []
    from llmctl.submit.memory_check import memory_plan

    plan = memory_plan(job, job.config)
    if plan is None or plan.fits:
        return []
    return [f"may not fit: {plan.why_not}; llmctl plan suggests a change"]


def job_problems(job: AskedJob, environment: Mapping[str, str], *, is_interactive: bool = False) -> Iterator[Problem]:
    """Problems of a job that need no contact with a machine, the most basic first. Pure.

    Args:
        job: with every value decided.
        environment: variables of the user, with the values of secrets.
        is_interactive: True for a job of ``llmctl interactive``, for which sites may have separate limits.
    """
    yield from _offer_problems(job)
    sized = list(_local_size_problems(job) if job.visible_gpus is not None else _size_problems(job))
    yield from sized
    named = job.spec.container or job.spec.mounts
    if ("container" in job.backend.job_keys) if named else (job.image is not None):
        from llmctl.submit.container_checks import container_problems

        yield from container_problems(job)
    yield from _limit_problems(job, is_interactive=is_interactive)
    if job.backend.capabilities.starts_on_hosts:
        from llmctl.submit.host_checks import host_problems

        yield from host_problems(job)
    for name in job.spec.secrets:
        if name not in environment:
            text = "is not set in your environment; export the variable first"
            yield Problem(f"--secret {name}", text, of="flag")
    if job.config is not None:
        from llmctl.submit.config_checks import config_problems

        found = list(config_problems(job, job.config, is_sized=not sized))
        yield from found
        if not sized and not found:
            from llmctl.submit.memory_check import memory_problems

            yield from memory_problems(job, job.config)


def python_problems(job: JobPlan) -> Iterator[Problem]:
    """An interpreter on another machine that the profile does not name."""
    profile = job.profile
    if not job.layout.python:
        host = profile.login.host or next(iter(profile.hosts), profile.name)
        yield Problem(
            "environment",
            f"is unset, and llmctl cannot guess the Python of {host} for the job\n"
            f"set environment: {{kind: venv, path: ...}} in {job.overlay}; llmctl clusters setup {profile.name} asks "
            "for it",
            of="profile",
        )


def _offer_problems(job: AskedJob) -> Iterator[Problem]:
    """Keys that the scheduler does not support, a wrong launcher, a missing group."""
    spec, profile, backend = job.spec, job.profile, job.backend
    for key, plural in _PLURALS.items():
        value = getattr(spec, key)
        if value and key not in backend.job_keys:
            shown = ", ".join(value) if isinstance(value, tuple) else value
            yield Problem(
                f"job.{key}", f"{shown!r} is not supported on {profile.name}, which has no {plural}; leave it out"
            )
    launcher = job.request.launcher
    if launcher not in backend.launchers and (spec.launcher is None or "launcher" in backend.job_keys):
        use = " or ".join(backend.launchers)
        yield Problem("job.launcher", f"{launcher} cannot start ranks on {profile.name}; use {use}")
    if profile.group_required and not job.request.group:
        yield Problem(
            "group",
            f"is unset, and {profile.name} needs a group, project or account to bill\ngive --group G, or set "
            f"LLMCTL_GROUP, or group in {job.overlay} (llmctl clusters setup {profile.name} writes it)",
            of="profile",
        )


def _size_problems(job: AskedJob) -> Iterator[Problem]:
    """An unknown kind of node, and more GPUs than the kind of node has."""
    profile, kind, wanted = job.profile, job.request.resource_type, job.spec.gpus_per_node
    resource = job.request.resource
    known = ", ".join(profile.resource_types)
    if resource is not None:
        if job.request.gpus_per_node > resource.gpus:
            yield Problem(
                "job.gpus_per_node",
                f"{wanted} is above {resource.gpus}, the GPUs of {kind} on {profile.name}; lower it, or raise nodes",
                also=("job.gpus_per_node", "job.resource_type"),
            )
        if resource.fraction and job.spec.nodes > 1:
            whole = [name for name, other in profile.resource_types.items() if not other.fraction]
            advice = f"whole nodes are {', '.join(whole)}" if whole else "ask for one"
            yield Problem(
                "job.nodes",
                f"{job.spec.nodes} x {kind}: {kind} is a part of a node, and a job gets only one part; {advice}",
                also=_SIZE,
            )
    elif kind is None and known:
        yield Problem("job.resource_type", f"is unset: {profile.name} has {known}; give --resource-type T")
    elif known:  # without resource_types in the profile, only the scheduler knows the valid names
        near = difflib.get_close_matches(str(kind), profile.resource_types, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        yield Problem("job.resource_type", f"{profile.name} has no {kind!r}; {hint}there are {known}")


def _local_size_problems(job: AskedJob) -> Iterator[Problem]:
    """More nodes or GPUs than this machine has."""
    nodes, wanted, gpus = job.spec.nodes, job.spec.gpus_per_node, job.visible_gpus or ()
    keys = ("job.nodes", "job.gpus_per_node")
    on_cpu = job.config is not None and job.config.training.device == "cpu"
    if nodes > MAX_LOCAL_NODES:
        text = f"{nodes} is above {MAX_LOCAL_NODES}: every node is a group of processes on this machine"
        yield Problem("job.nodes", text)
    elif (on_cpu or not gpus) and wanted is not None and wanted > 1:
        why = "training.device is cpu" if on_cpu and gpus else "this machine has no GPU"
        yield Problem(keys[1], f"{wanted} is above 1, and {why}: every node has one rank; raise nodes instead")
    elif job.request.gpus_per_node * nodes > len(gpus):
        each = job.request.gpus_per_node
        yield Problem(
            keys[0] if wanted is None or nodes > 1 else keys[1],
            f"{nodes} nodes x {each} GPUs = {nodes * each}, but this machine has {len(gpus)}; "
            "lower one, or train without GPUs by training.device=cpu",
            also=keys,
        )


def _limit_problems(job: AskedJob, *, is_interactive: bool) -> Iterator[Problem]:
    """More nodes, time or node-hours than the site allows.

    The limits do not apply to a reservation.
    """
    request = job.request
    yield from _scheduler_problems(job)
    if request.reservation is not None:
        return
    nodes, time_s = request.nodes, request.time_s
    for limit, whose in _limits(job, is_interactive=is_interactive):
        if limit.max_nodes is not None and nodes > limit.max_nodes:
            yield Problem("job.nodes", f"{nodes} nodes are above {limit.max_nodes}, the limit of {whose}", also=_SIZE)
        if time_s is None:
            continue
        if limit.max_time is not None and time_s > limit.max_time:
            text = f"{clock(time_s)} is above {clock(limit.max_time)}, the longest time of {whose}"
            yield Problem("job.time", text, also=_LENGTH)
        hours = nodes * time_s / 3600
        if limit.max_node_hours is not None and hours > limit.max_node_hours:
            yield Problem(
                "job.time",
                f"{nodes} nodes x {clock(time_s)} = {hours:g} node-hours, above {limit.max_node_hours:g}, "
                f"the limit of {whose}; lower nodes or time",
                also=_LENGTH,
            )


def _limits(job: AskedJob, *, is_interactive: bool) -> list[tuple[_Limits, str]]:
    """Limits of a job, each with its owner.

    A queue's limits override the general limits, key by key.
    """
    profile, request, general = job.profile, job.request, job.profile.limits
    found: list[tuple[_Limits, str]] = []
    if request.resource is not None:
        found.append((request.resource, f"{request.resource_type} on {profile.name}"))
    own = general.queues.get(request.queue or "")
    if own is not None:
        found.append((own, f"queue {request.queue} of {profile.name}"))
        general = general.model_copy(update=dict.fromkeys(own.model_fields_set))
    found.append((general, profile.name))
    if is_interactive and general.interactive is not None:
        found.append((general.interactive, f"interactive jobs on {profile.name}"))
    if general.without_group is not None and not request.group:
        found.append((general.without_group, f"jobs without a group on {profile.name}"))
    if own is None or own.max_time is None:  # a queue's time limit replaces the limits by number of nodes
        for most, longest in general.time_by_nodes:
            if request.nodes <= most:
                size = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
                found.append((QueueLimits(max_time=longest), f"{profile.name} for {size}"))
                break
    return found


def _scheduler_problems(job: AskedJob) -> Iterator[Problem]:
    """A priority or options that the scheduler's backend refuses."""
    if not job.backend.capabilities.has_queue:
        return
    queue, priority = cast("QueueBackend", job.backend), job.request.priority
    wrong = queue.priority_problem(priority) if priority is not None else ""
    if wrong:
        yield Problem("job.priority", wrong)
    wrong = queue.options_problem(job.request.site_options)
    if wrong:
        yield Problem("options", wrong, of="profile")


def path_problems(checks: Sequence[PathCheck], transport: Transport) -> list[Problem]:
    """Inspect all paths in one round trip; returns problems in the order of the checks.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    paths = list(dict.fromkeys([path for check in checks for path in check.paths]))
    facts = dict(zip(paths, transport.stat_paths(paths), strict=True))
    return [problem for check in checks if (problem := check.judge(facts)) is not None]


def runs_root_name_problems(profile: ClusterProfile, folders: UserFolders) -> list[Problem]:
    """A character in runs_root that PYTHONPATH or hostfiles cannot hold."""
    wrong = next((letter for letter in profile.runs_root or "" if letter == ":" or ord(letter) < 32), None)
    if wrong is None:
        return []
    return [runs_root_problem(profile, folders, f"PYTHONPATH and hostfiles cannot hold {wrong!r}; name another")]


def runs_root_path(profile: ClusterProfile, folders: UserFolders) -> PathCheck:
    """Check that the folder of the runs can be created and written."""
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
    """Refuse a folder for the runs that cannot be created or written.

    Raises:
        ProfileError: names the folder, the obstacle, and the file or variable that sets the folder.
        SchedulerError: the machine cannot be reached.
    """
    problems = runs_root_name_problems(profile, context.folders)
    if not problems:
        problems = path_problems([runs_root_path(profile, context.folders)], context.connect(profile))
    if problems:
        raise profile_error(context, profile, problems)


def why_unwritable(folder: str, facts: PathFacts) -> str:
    """The obstacle to writing a folder and its missing parents; empty without one."""
    if facts.nearest_kind != "folder":
        return f"{facts.nearest} is not a folder"
    if not facts.can_write:
        return f"you cannot write to {facts.nearest}"
    if facts.is_read_only:
        return f"{facts.nearest} is on a file system mounted read-only"
    if facts.nearest != folder and facts.nearest.startswith(("/proc", "/sys")):
        return f"{facts.nearest} belongs to the kernel and cannot hold your files"
    return ""
