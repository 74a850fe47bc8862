"""What the site would refuse, or leave in its queue for ever: refused here, before the queue. Pure."""

from llmctl.backends import load_queue_backend
from llmctl.durations import clock
from llmctl.errors import ProfileError
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, LimitsProfile, QueueLimits, ResourceType
from llmctl.submit.request import queue_of, resource_type_of, time_of
from llmctl.submit.resolve import Resolved

_Limits = ResourceType | LimitsProfile | QueueLimits
_SIZE = ("job.nodes", "job.resource_type", "job.queue")
_LENGTH = ("job.time", "job.nodes", "job.resource_type", "job.queue")


def check_limits(resolved: Resolved, job: JobSpec, profile: ClusterProfile, *, is_interactive: bool = False) -> None:
    """Refuse more nodes, time or node-hours than the site gives. A reservation goes by rules of its own.

    Raises:
        UsageError, ConfigFileError: names what was asked for, the limit, and whose it is.
        ProfileError: the profile's own priority is none that users may have, or its options lead to another cluster.
    """
    _check_priority(resolved, job, profile)
    _check_options(job, profile)
    kind = resource_type_of(job, profile)
    resource = profile.resource_types.get(kind or "")
    if resource is not None and resource.fraction and job.nodes > 1:
        raise resolved.refusal(
            "job.nodes",
            f"{job.nodes} x {kind}: {kind} is a part of a node, and a job gets one of it; {_whole_nodes(profile)}",
            also=_SIZE,
        )
    if job.reservation is not None:
        return
    own_ways = _ways(job, profile, is_interactive=is_interactive)
    for limit, whose in [*_limits(job, profile, resource), *own_ways]:
        _check_nodes(resolved, job, limit, whose)
        _check_time(resolved, job, profile, limit.max_time, whose)
        _check_node_hours(resolved, job, profile, limit, whose)
    own = profile.limits.queues.get(queue_of(job, profile) or "")
    if own is not None and own.max_time is not None:
        return  # such a queue does not go by the number of nodes
    longest = next((time for nodes, time in profile.limits.time_by_nodes if job.nodes <= nodes), None)
    _check_time(resolved, job, profile, longest, f"{profile.name} for {job.nodes} node{'s' if job.nodes > 1 else ''}")


def _ways(job: JobSpec, profile: ClusterProfile, *, is_interactive: bool) -> list[tuple[_Limits, str]]:
    """Limits of the way in which a job is asked for."""
    found: list[tuple[_Limits, str]] = []
    if is_interactive and profile.limits.interactive is not None:
        found.append((profile.limits.interactive, f"interactive jobs on {profile.name}"))
    if profile.limits.without_group is not None and not (job.group or profile.group):
        found.append((profile.limits.without_group, f"jobs without a group on {profile.name}"))
    return found


def _check_priority(resolved: Resolved, job: JobSpec, profile: ClusterProfile) -> None:
    """Refuse a priority that the scheduler would not give to users."""
    priority = job.priority if job.priority is not None else profile.defaults.priority
    queue = load_queue_backend(profile.scheduler)
    problem = queue.priority_problem(priority) if queue is not None and priority is not None else ""
    if not problem:
        return
    if job.priority is None:
        raise ProfileError(f"cluster {profile.name}: defaults.priority: {problem}")
    raise resolved.refusal("job.priority", problem)


def _check_options(job: JobSpec, profile: ClusterProfile) -> None:
    """Refuse directives that the scheduler's backend cannot work with, such as another cluster's name."""
    resource = profile.resource_types.get(resource_type_of(job, profile) or "")
    options = (*profile.options, *(resource.options if resource is not None else ()))
    queue = load_queue_backend(profile.scheduler)
    problem = queue.options_problem(options) if queue is not None else ""
    if problem:
        raise ProfileError(f"cluster {profile.name}: options: {problem}")


def _limits(job: JobSpec, profile: ClusterProfile, resource: ResourceType | None) -> list[tuple[_Limits, str]]:
    """Whose limits hold. A queue's own lie over the general ones, key by key."""
    queue = queue_of(job, profile)
    found: list[tuple[_Limits, str]] = []
    if resource is not None:
        found.append((resource, f"{resource_type_of(job, profile)} on {profile.name}"))
    own = profile.limits.queues.get(queue or "")
    general = profile.limits
    if own is not None:
        found.append((own, f"queue {queue} of {profile.name}"))
        general = general.model_copy(update={key: None for key in own.model_fields_set})
    return [*found, (general, profile.name)]


def _check_nodes(resolved: Resolved, job: JobSpec, limit: _Limits, whose: str) -> None:
    if limit.max_nodes is not None and job.nodes > limit.max_nodes:
        raise resolved.refusal(
            "job.nodes", f"{job.nodes} nodes are above {limit.max_nodes}, the limit of {whose}", also=_SIZE
        )


def _check_time(resolved: Resolved, job: JobSpec, profile: ClusterProfile, limit: int | None, whose: str) -> None:
    time_s = time_of(job, profile)
    if time_s is not None and limit is not None and time_s > limit:
        raise resolved.refusal(
            "job.time", f"{clock(time_s)} is above {clock(limit)}, the longest time of {whose}", also=_LENGTH
        )


def _check_node_hours(resolved: Resolved, job: JobSpec, profile: ClusterProfile, limit: _Limits, whose: str) -> None:
    time_s = time_of(job, profile)
    if time_s is None or limit.max_node_hours is None:
        return
    hours = job.nodes * time_s / 3600
    if hours > limit.max_node_hours:
        raise resolved.refusal(
            "job.time",
            f"{job.nodes} nodes x {clock(time_s)} = {hours:g} node-hours, above {limit.max_node_hours:g}, "
            f"the limit of {whose}; lower nodes or time",
            also=_LENGTH,
        )


def _whole_nodes(profile: ClusterProfile) -> str:
    whole = [name for name, kind in profile.resource_types.items() if not kind.fraction]
    return f"whole nodes are {', '.join(whole)}" if whole else "ask for one"
