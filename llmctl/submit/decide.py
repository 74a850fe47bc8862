"""Decision of every value that a job leaves open: JobSpec -> Job, with the JobRequest for the scheduler.

Nothing is refused here. The profile fills in the open values: first the kind of node, then the profile's defaults.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmctl.backends.base import Backend, JobRequest, QueueBackend
from llmctl.context import ClusterSession, Context, secrets_file
from llmctl.paths import UserFolders, expand_home
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, ResourceType
from llmctl.submit.job import Job

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan
    from trainer.config.train_config import TrainConfig


def decide_job(
    context: Context,
    session: ClusterSession,
    spec: JobSpec,
    config: "TrainConfig | None",
    run_dir: Path,
    *,
    submission: int = 1,
    cwd: str | None = None,
) -> Job:
    """Decide every value that the job leaves open.

    Args:
        context: of this call.
        session: of the cluster, for jobs.
        spec: the user's job.
        config: of a training run; None for a COMMAND.
        run_dir: of the run.
        submission: number of the submission.
        cwd: working directory of a COMMAND; None: this call's working directory, or the run directory if remote.
    """
    profile, is_remote = session.profile, session.transport.is_remote
    backend = session.backend or context.backend(profile)
    visible = _visible_gpus(context) if backend.capabilities.starts_in_place else None
    image = image_of(spec, profile)
    in_container = image is not None and profile.container.runtime is not None
    outside = run_dir if is_remote else Path(cwd or context.cwd)
    place = Path((in_container and profile.container.workdir) or outside)
    working_dir = run_dir / "code" / "user" if spec.code else place
    mounts, new_folders, container = _container(spec, profile, config, run_dir, working_dir, str(context.cwd))
    request = build_request(
        spec,
        profile,
        backend,
        name=run_dir.name,
        run_dir=str(run_dir),
        container=container,
        visible_gpus=visible,
        on_cpu=config is not None and config.training.device == "cpu",
    )
    # Our own interpreter means nothing on another machine; a COMMAND needs Python only for the rendezvous.
    own_python = sys.executable if not is_remote else "python3" if spec.command else ""
    return Job(
        spec=spec,
        config=config,
        request=request,
        backend=backend,
        folders=context.folders,
        is_remote=is_remote,
        submission=submission,
        python=job_python(profile, context.folders, own_python, in_container=in_container),
        working_dir=working_dir,
        secrets_file=Path(secrets_file(context, profile, run_dir, submission)) if spec.secrets else None,
        unset_secrets=tuple(name for name in spec.secrets if name not in context.environment),
        image=image,
        own_mounts=mounts,
        new_folders=new_folders,
        visible_gpus=visible,
    )


def _visible_gpus(context: Context) -> tuple[str, ...]:
    from llmctl.submit.visible_gpus import visible_gpus

    return visible_gpus(context)


def _container(
    spec: JobSpec, profile: ClusterProfile, config: "TrainConfig | None", run_dir: Path, working_dir: Path, cwd: str
) -> "tuple[tuple[str, ...], tuple[str, ...], ContainerPlan | None]":
    """Folders that the job's container must mount, those to create first, and the container. All empty for no image."""
    if image_of(spec, profile) is None:
        return (), (), None
    from llmctl.site.container import plan_container
    from llmctl.submit.container_mounts import own_mounts

    mounts, written = own_mounts(spec, profile, config, run_dir, working_dir)
    container = plan_container(spec, profile, cwd=cwd, own_mounts=mounts)
    return mounts, written if container is not None else (), container


def build_request(
    spec: JobSpec,
    profile: ClusterProfile,
    backend: Backend,
    *,
    name: str,
    run_dir: str,
    container: "ContainerPlan | None" = None,
    visible_gpus: Sequence[str] | None = None,
    on_cpu: bool = False,
) -> JobRequest:
    """The request to the scheduler.

    Args:
        spec: the user's job.
        profile: of the cluster.
        backend: of its scheduler.
        name: of the job: the run id.
        run_dir: the run directory, absolute.
        container: of the job; None for a job without a container.
        visible_gpus: GPUs of this machine, if this machine is the cluster; else None.
        on_cpu: True for a job without GPUs.
    """
    defaults = profile.defaults
    kind = spec.resource_type or defaults.resource_type
    resource = profile.resource_types.get(kind or "")
    launcher = spec.launcher or profile.launch.launcher or backend.launchers[0]
    ranks, gpus = _node_size(spec, resource, visible_gpus, on_cpu=on_cpu)
    # torchrun starts the ranks of its node itself.
    tasks = 1 if launcher == "torchrun" else ranks
    cores = resource.cores if resource is not None else None
    hosts = tuple(host for host in profile.hosts if host not in spec.exclude)
    return JobRequest(
        profile=profile,
        job_name=cast("QueueBackend", backend).job_name(name) if backend.capabilities.has_queue else name,
        run_dir=run_dir,
        nodes=spec.nodes,
        spare_nodes=spec.spare_nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        gpu_ids=_shares(visible_gpus or (), gpus, spec.nodes),
        tasks_per_node=tasks,
        # A multiple of the tasks: Slurm and PBS ask for cores per task.
        cores_per_node=max(1, cores // tasks) * tasks if cores is not None else None,
        time_s=spec.time_s if spec.time_s is not None else defaults.time,
        launcher=launcher,
        resource_type=kind,
        resource=resource,
        site_options=(*profile.options, *(resource.options if resource is not None else ())),
        group=spec.group or profile.group,
        queue=spec.queue or (resource.queue if resource is not None else None) or defaults.queue,
        reservation=spec.reservation,
        priority=spec.priority if spec.priority is not None else defaults.priority,
        exclude=spec.exclude,
        hosts=hosts[: spec.nodes] if backend.capabilities.starts_on_hosts else (),
        container=container,
    )


def image_of(spec: JobSpec, profile: ClusterProfile) -> str | None:
    """The image of a job or of the profile's environment; None without a container."""
    software = profile.environment
    return spec.container or (software.path if software.kind == "container" else None)


def job_python(profile: ClusterProfile, folders: UserFolders, own: str, *, in_container: bool = False) -> str:
    """The interpreter of a cluster's jobs.

    Args:
        profile: of the cluster.
        folders: the user's folders, for ``~``.
        own: the interpreter of llmctl, for a profile that names no interpreter.
        in_container: True if the job runs in an image, with the image's interpreter.
    """
    software = profile.environment
    if in_container or software.kind == "container":
        return (software.python if software.kind == "container" else None) or "python3"
    if software.python is not None:
        return str(expand_home(software.python, folders))
    return str(expand_home(software.path, folders) / "bin/python") if software.path is not None else own


def _node_size(
    spec: JobSpec, resource: ResourceType | None, visible_gpus: Sequence[str] | None, *, on_cpu: bool
) -> tuple[int, int]:
    """Ranks and GPUs of each node, from the job or else from the kind of node.

    On this machine the visible GPUs are divided among the nodes.
    """
    wanted = spec.gpus_per_node
    if visible_gpus is not None:
        ranks = wanted or max(1, len(visible_gpus) // spec.nodes)
        return (1, 0) if on_cpu or not visible_gpus else (ranks, ranks)
    if on_cpu or (resource is not None and not resource.gpus):
        return wanted or 1, 0
    if resource is None:
        return wanted or 1, wanted or 0
    return wanted or resource.gpus, wanted or resource.gpus


def _shares(visible_gpus: Sequence[str], gpus: int, nodes: int) -> tuple[tuple[str, ...], ...]:
    """The GPUs of each node of this machine; empty without GPUs."""
    if not gpus:
        return ()
    starts = range(0, min(nodes * gpus, len(visible_gpus)), gpus)
    return tuple(tuple(visible_gpus[start : start + gpus]) for start in starts)
