"""From what the user asked for to what the scheduler is asked for: the profile answers what was left open.

Flag or config first, then what the profile says of the kind of node, then its defaults. Pure.
"""

import difflib
from collections.abc import Sequence

from llmctl.backends import load_backend, load_queue_backend
from llmctl.backends.base import JobRequest
from llmctl.errors import ProfileError
from llmctl.paths import UserFolders
from llmctl.site.container import plan_container
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, ResourceType
from llmctl.submit.resolve import Resolved


def build_request(
    job: JobSpec,
    profile: ClusterProfile,
    *,
    run_id: str,
    run_dir: str,
    after_ids: Sequence[str] = (),
    after_any: bool = False,
    ranks_per_node: int,
    gpus_per_node: int,
    own_mounts: Sequence[str] = (),
    cwd: str = "/",
) -> JobRequest:
    """What the scheduler is asked for.

    Args:
        job: what the user asked for.
        profile: of the cluster.
        run_id: of the run; becomes the job's name.
        run_dir: the run directory, absolute.
        after_ids: jobs that must have ended before.
        after_any: however they end; otherwise well, as far as the scheduler can tell.
        ranks_per_node: G.
        gpus_per_node: GPUs that each node is asked for.
        own_mounts: folders that the job needs in its container in any case.
        cwd: where a relative path of an image counts from.
    """
    queue = load_queue_backend(profile.scheduler)
    kind = resource_type_of(job, profile)
    resource = profile.resource_types.get(kind or "")
    return JobRequest(
        profile=profile,
        job_name=queue.job_name(run_id) if queue is not None else run_id,
        run_dir=run_dir,
        nodes=job.nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        cores_per_node=resource.cores if resource is not None else None,
        time_s=time_of(job, profile),
        launcher=launcher_of(job, profile),
        resource_type=kind,
        group=job.group or profile.group,
        queue=queue_of(job, profile),
        reservation=job.reservation,
        priority=job.priority if job.priority is not None else profile.defaults.priority,
        container=plan_container(job, profile, cwd=cwd, own_mounts=tuple(own_mounts)),
        after=tuple(after_ids),
        after_any=after_any,
    )


def resource_type_of(job: JobSpec, profile: ClusterProfile) -> str | None:
    """The kind of node: as asked for, else the profile's default."""
    return job.resource_type or profile.defaults.resource_type


def queue_of(job: JobSpec, profile: ClusterProfile) -> str | None:
    """The queue: as asked for, else that of the kind of node, else the profile's default."""
    resource = profile.resource_types.get(resource_type_of(job, profile) or "")
    return job.queue or (resource.queue if resource is not None else None) or profile.defaults.queue


def time_of(job: JobSpec, profile: ClusterProfile) -> int | None:
    """Seconds: as asked for, else the profile's default; None leaves it to the site."""
    return job.time_s if job.time_s is not None else profile.defaults.time


def launcher_of(job: JobSpec, profile: ClusterProfile) -> str:
    """What starts the ranks: as asked for, else the profile's, else the scheduler's first."""
    return job.launcher or profile.launch.launcher or load_backend(profile.scheduler).launchers[0]


def size_of_node(resolved: Resolved, job: JobSpec, profile: ClusterProfile, on_cpu: bool) -> tuple[int, int]:
    """(ranks of each node, GPUs that each node is asked for) on a cluster other than this machine alone.

    Args:
        resolved: names the culprit.
        job: gives the kind of node and G, if it was given.
        profile: of the cluster.
        on_cpu: whether the job asks for no GPU.

    Raises:
        UsageError, ConfigFileError: there is no such kind of node, or it has fewer GPUs.
    """
    resource = _resource(resolved, job, profile)
    wanted = job.gpus_per_node
    if on_cpu or (resource is not None and resource.gpus == 0):
        return wanted or 1, 0
    if resource is None:
        return wanted or 1, wanted or 0
    if wanted is not None and wanted > resource.gpus:
        kind = resource_type_of(job, profile)
        raise resolved.refusal(
            "job.gpus_per_node",
            f"{wanted} is above {resource.gpus}, the GPUs of {kind} on {profile.name}; lower it, or raise nodes",
            also=("job.gpus_per_node", "job.resource_type"),
        )
    return wanted or resource.gpus, wanted or resource.gpus


def check_group(job: JobSpec, profile: ClusterProfile, folders: UserFolders) -> None:
    """Refuse to submit without a group where the site needs one.

    Raises:
        ProfileError: names the three ways to give it.
    """
    if profile.group_required and not (job.group or profile.group):
        raise ProfileError(
            f"cluster {profile.name} needs a group, project or account to bill\n"
            f"give --group G, or set LLMCTL_GROUP, or group in {folders.clusters / profile.name}.yaml "
            f"(llmctl clusters setup {profile.name} writes it)"
        )


def check_launcher(resolved: Resolved, job: JobSpec, profile: ClusterProfile) -> None:
    """Refuse a launcher that the scheduler cannot start the ranks with.

    Raises:
        UsageError, ConfigFileError: names the flag or file that it came from.
        ProfileError: the profile's own cannot.
    """
    launchers = load_backend(profile.scheduler).launchers
    launcher = launcher_of(job, profile)
    if launcher in launchers:
        return
    problem = f"{launcher} cannot start ranks on {profile.name}; use {' or '.join(launchers)}"
    if job.launcher is None:
        raise ProfileError(f"cluster {profile.name}: launch.launcher: {problem}")
    raise resolved.refusal("job.launcher", problem)


def _resource(resolved: Resolved, job: JobSpec, profile: ClusterProfile) -> ResourceType | None:
    kind = resource_type_of(job, profile)
    if kind in profile.resource_types:
        return profile.resource_types[kind]
    known = ", ".join(profile.resource_types)
    if kind is None:
        if not profile.resource_types:
            return None
        raise resolved.refusal("job.resource_type", f"is unset: {profile.name} has {known}; give --resource-type T")
    if not profile.resource_types:
        return None  # the site's own word, which only the scheduler knows
    near = difflib.get_close_matches(kind, profile.resource_types, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise resolved.refusal("job.resource_type", f"{profile.name} has no {kind!r}; {hint}there are {known}")
