"""Checks of a job against its profile: keys of the scheduler, size, limits, secrets, places. Pure."""

import difflib
from collections.abc import Iterable, Iterator

from llmctl.durations import clock
from llmctl.paths import UserFolders
from llmctl.site.profile import ClusterProfile, LimitsProfile, QueueLimits, ResourceType
from llmctl.submit.job import Job, Problem

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


def site_problems(job: Job) -> Iterator[Problem]:
    """A job that the site cannot run, or does not allow."""
    yield from _offer_problems(job)
    yield from size_problems(job)
    yield from _limit_problems(job)
    for name in job.unset_secrets:
        text = "is not set in your environment; export the variable first"
        yield Problem(f"--secret {name}", text, of="flag")


def place_problems(job: Job) -> Iterator[Problem]:
    """An interpreter or a folder of the runs that a job cannot use."""
    if not job.python and not job.is_interactive:
        yield _no_python(job)
    yield from runs_root_name_problems(job.request.profile, job.folders)


def crowd_warnings(job: Job, cores: int) -> Iterator[str]:
    """A job on this machine with more ranks than the machine has cores."""
    processes = job.request.nodes * job.request.ranks_per_node
    if processes > cores:
        what = "ranks" if job.config is not None else "processes"
        yield f"--nodes: {processes} {what} share the {cores} cores of this machine, which is slow; {cores} fit"


def literal_warnings(job: Job) -> Iterator[str]:
    """Variables in the values of job.env, where people may expect their values."""
    found = [(name, value) for name, value in job.spec.env if "$" in value]
    if not found:
        return
    from trainer.config.paths.variables import names_in

    for name, value in found:
        if names := names_in(value):
            yield f"job.env.{name}: ${names[0]} is passed on as it stands; only paths of the config have variables"


def _offer_problems(job: Job) -> Iterator[Problem]:
    """Keys that the scheduler does not support, a wrong launcher, a missing group."""
    spec, profile, backend = job.spec, job.request.profile, job.backend
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


def size_problems(job: Job) -> Iterator[Problem]:
    """An unknown kind of node, and more nodes or GPUs than the kind of node or this machine has."""
    yield from _here_problems(job) if job.visible_gpus is not None else _node_problems(job)


def _node_problems(job: Job) -> Iterator[Problem]:
    """An unknown kind of node, and more GPUs than the kind of node has."""
    profile, kind, wanted = job.request.profile, job.request.resource_type, job.spec.gpus_per_node
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


def _here_problems(job: Job) -> Iterator[Problem]:
    """More nodes or GPUs than this machine has."""
    nodes, wanted, gpus = job.spec.nodes, job.spec.gpus_per_node, job.visible_gpus or ()
    keys = ("job.nodes", "job.gpus_per_node")
    on_cpu = job.config is not None and job.config.training.device == "cpu"
    if nodes > MAX_LOCAL_NODES:
        text = f"{nodes} is above {MAX_LOCAL_NODES}: every node is a group of processes on this machine"
        yield Problem("job.nodes", text)
    elif (on_cpu or not gpus) and wanted is not None and wanted > 1:
        why = "training.device is cpu" if on_cpu and gpus else "this machine has no GPU"
        remedy = f"give --gpus-per-node 1 --nodes {nodes * wanted} for as many ranks, or fewer"
        yield Problem(keys[1], f"{wanted} is above 1, and {why}: every node has one rank; {remedy}")
    elif job.request.gpus_per_node * nodes > len(gpus):
        each = job.request.gpus_per_node
        yield Problem(
            keys[0] if wanted is None or nodes > 1 else keys[1],
            f"{nodes} nodes x {each} GPUs = {nodes * each}, but this machine has {len(gpus)}; "
            "lower one, or train without GPUs by training.device=cpu",
            also=keys,
        )


def _limit_problems(job: Job) -> Iterator[Problem]:
    """More nodes, time or node-hours than the site allows.

    The limits do not apply to a reservation.
    """
    request = job.request
    yield from _scheduler_problems(job)
    if request.reservation is not None:
        return
    nodes, time_s = request.nodes + request.spare_nodes, request.time_s
    limits = _limits(job)
    most = _strictest((limit.max_nodes, whose) for limit, whose in limits)
    if most is not None and nodes > most[0]:
        yield Problem("job.nodes", f"{nodes} nodes are above {most[0]}, the limit of {most[1]}", also=_SIZE)
    if time_s is None:
        return
    longest = _strictest((limit.max_time, whose) for limit, whose in limits)
    if longest is not None and time_s > longest[0]:
        text = f"{clock(time_s)} is above {clock(longest[0])}, the longest time of {longest[1]}"
        yield Problem("job.time", text, also=_LENGTH)
    hours = nodes * time_s / 3600
    most_hours = _strictest((limit.max_node_hours, whose) for limit, whose in limits)
    if most_hours is not None and hours > most_hours[0]:
        yield Problem(
            "job.time",
            f"{nodes} nodes x {clock(time_s)} = {hours:g} node-hours, above {most_hours[0]:g}, "
            f"the limit of {most_hours[1]}; lower nodes or time",
            also=_LENGTH,
        )


def _strictest(limits: Iterable[tuple[float | None, str]]) -> tuple[float, str] | None:
    """The lowest of the limits that are set, with its owner: higher ones need no word."""
    known = [(value, whose) for value, whose in limits if value is not None]
    return min(known, key=lambda limit: limit[0], default=None)


def _limits(job: Job) -> list[tuple[_Limits, str]]:
    """Limits of a job, each with its owner.

    A queue's limits override the general limits, key by key.
    """
    request, profile = job.request, job.request.profile
    general = profile.limits
    found: list[tuple[_Limits, str]] = []
    if request.resource is not None:
        found.append((request.resource, f"{request.resource_type} on {profile.name}"))
    own = general.queues.get(request.queue or "")
    if own is not None:
        found.append((own, f"queue {request.queue} of {profile.name}"))
        general = general.model_copy(update=dict.fromkeys(own.model_fields_set))
    found.append((general, profile.name))
    if job.is_interactive and general.interactive is not None:
        found.append((general.interactive, f"interactive jobs on {profile.name}"))
    if general.without_group is not None and not request.group:
        found.append((general.without_group, f"jobs without a group on {profile.name}"))
    nodes = request.nodes + request.spare_nodes
    if own is None or own.max_time is None:  # a queue's time limit replaces the limits by number of nodes
        for most, longest in general.time_by_nodes:
            if nodes <= most:
                size = f"{nodes} node{'s' if nodes > 1 else ''}"
                found.append((QueueLimits(max_time=longest), f"{profile.name} for {size}"))
                break
    return found


def _scheduler_problems(job: Job) -> Iterator[Problem]:
    """A priority or options that the scheduler's backend refuses."""
    queue, priority = job.queue, job.request.priority
    if queue is None:
        return
    wrong = queue.priority_problem(priority) if priority is not None else ""
    if wrong:
        yield Problem("job.priority", wrong)
    wrong = queue.options_problem(job.request.site_options)
    if wrong:
        yield Problem("options", wrong, of="profile")


def _no_python(job: Job) -> Problem:
    """The problem of an interpreter on another machine that the profile does not name."""
    profile = job.request.profile
    host = profile.login.host or next(iter(profile.hosts), profile.name)
    return Problem(
        "environment",
        f"is unset, and llmctl cannot guess the Python of {host} for the job\n"
        f"set environment: {{kind: venv, path: ...}} in {job.overlay}; llmctl clusters setup {profile.name} asks "
        "for it",
        of="profile",
    )


def runs_root_name_problems(profile: ClusterProfile, folders: UserFolders) -> list[Problem]:
    """A character in runs_root that PYTHONPATH or hostfiles cannot hold."""
    wrong = next((letter for letter in profile.runs_root or "" if letter == ":" or ord(letter) < 32), None)
    if wrong is None:
        return []
    return [runs_root_problem(profile, folders, f"PYTHONPATH and hostfiles cannot hold {wrong!r}; name another")]


def runs_root_problem(profile: ClusterProfile, folders: UserFolders, why: str) -> Problem:
    """The problem of a folder that cannot hold the runs."""
    remedy = f"set LLMCTL_RUNS_ROOT, or runs_root in {folders.clusters / profile.name}.yaml"
    return Problem("runs_root", f"{profile.runs_root} cannot hold the runs: {why}\n{remedy}", of="profile")
