"""JobSpec -> JobPlan: the request to the scheduler, and the layout of the run.

Nothing is refused here. The profile fills in every value that the job leaves open: first the kind of node, then the
profile's defaults.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from llmctl.backends.base import Backend, JobRequest, QueueBackend
from llmctl.context import ClusterSession, Context, secrets_file
from llmctl.paths import UserFolders
from llmctl.site.container import ContainerPlan, plan_container
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, expand_home
from trainer.config.train_config import TrainConfig

"""Beside the runs: the caches shared by all runs of a user."""


@dataclass(frozen=True)
class NodeSize:
    """Size of each node of a job.

    Attributes:
        ranks: G, the ranks of each node.
        gpus: GPUs requested of each node; 0 for a job on CPUs.
        gpu_ids: ids of the GPUs of each node, if this machine is the cluster and has GPUs.
    """

    ranks: int
    gpus: int
    gpu_ids: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class RunLayout:
    """Run layout: size, places and Python of one submission.

    Attributes:
        run_id: of the run.
        run_dir: directory of the run, absolute.
        submission: 1 for the first; every resume adds 1.
        python: the interpreter, absolute or found in the job's PATH.
        gpus: ids of the GPUs of each node; empty without GPUs.
        ranks_per_node: ranks of each node.
        working_dir: working directory of a COMMAND.
        secrets_file: file with the values of the secrets; None without secrets.
    """

    run_id: str
    run_dir: Path
    submission: int
    python: str
    gpus: tuple[tuple[str, ...], ...]
    ranks_per_node: int
    working_dir: Path
    secrets_file: Path | None


@dataclass(frozen=True, kw_only=True)
class AskedJob:
    """A job and its request: the input of the checks.

    Attributes:
        spec: the user's job.
        config: of a training run; None for a COMMAND.
        profile: of the cluster, with paths resolved.
        folders: the user's folders.
        is_remote: True if the cluster is reached over the network.
        backend: of the scheduler.
        request: for the scheduler.
        image: image of the job; None for a job without a container.
        own_mounts: folders that the job's container must mount; empty without a container.
        visible_gpus: GPUs of this machine, if this machine is the cluster; else None.
    """

    spec: JobSpec
    config: TrainConfig | None = None
    profile: ClusterProfile
    folders: UserFolders
    is_remote: bool
    backend: Backend
    request: JobRequest
    image: str | None = None
    own_mounts: tuple[str, ...] = ()
    visible_gpus: tuple[str, ...] | None = None

    @property
    def overlay(self) -> Path:
        """Path of the user's overlay of the cluster's profile."""
        return self.folders.clusters / f"{self.profile.name}.yaml"


@dataclass(frozen=True, kw_only=True)
class JobPlan(AskedJob):
    """A job with every value decided.

    Attributes:
        layout: run layout.
        queue: the backend, if the scheduler has a queue; else None.
        new_folders: folders to create first, because a container can mount only existing folders.
    """

    layout: RunLayout
    queue: QueueBackend | None
    new_folders: tuple[str, ...]

    @cached_property
    def cost(self) -> "JobCost | None":
        """Size and largest charge; None without a queue."""
        return JobCost.of(self.request) if self.queue is not None else None


@dataclass(frozen=True)
class JobCost:
    """Size of a request and its largest charge.

    Attributes:
        nodes: number of nodes.
        gpus_per_node: GPUs of each node; 0 for a job on CPUs.
        resource_type: the site's name of the kind of node; None if the site has no kinds.
        hours: time limit; None: the site's own default.
        points: charge for the whole time; None if the rate or the time is unknown.
        unit: of the points.
    """

    nodes: int
    gpus_per_node: int
    resource_type: str | None
    hours: float | None
    points: float | None
    unit: str

    @classmethod
    def of(cls, request: JobRequest) -> "JobCost":
        """The cost of a request, by the rates of its profile."""
        cost, resource = request.profile.cost, request.resource
        hours = request.time_s / 3600 if request.time_s is not None else None
        points = None
        if hours is not None and resource is not None and resource.points_per_hour is not None:
            points = resource.points_per_hour * request.nodes * hours
            points *= cost.reserved_factor if request.reservation is not None else 1.0
            points *= cost.priority_factors.get(request.priority, 1.0) if request.priority is not None else 1.0
        return cls(request.nodes, request.gpus_per_node, request.resource_type, hours, points, cost.unit)

    @property
    def node_hours(self) -> float | None:
        """Nodes x hours; None for the site's default time."""
        return None if self.hours is None else self.nodes * self.hours

    def __str__(self) -> str:
        """One line: ``8 nodes of rt_HF x 8 GPUs x 2 h = 16 node-hours, at most 96 points``."""
        kind = f" of {self.resource_type}" if self.resource_type else ""
        size = f"{_count(self.nodes, 'node')}{kind}"
        if self.gpus_per_node:
            size += f" x {_count(self.gpus_per_node, 'GPU')}"
        if self.hours is None:
            return f"{size}, for the site's default time"
        points = f", at most {self.points:,.10g} {self.unit}" if self.points is not None else ""
        return f"{size} x {self.hours:.4g} h = {self.node_hours:.6g} node-hours{points}"

    def as_json(self) -> Mapping[str, Any]:
        """Plain values."""
        return {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "resource_type": self.resource_type,
            "hours": self.hours,
            "node_hours": self.node_hours,
            "points": self.points,
            "unit": self.unit if self.points is not None else None,
        }


def plan_job(
    context: Context,
    session: ClusterSession,
    spec: JobSpec,
    config: TrainConfig | None,
    run_dir: Path,
    *,
    submission: int = 1,
    cwd: str | None = None,
) -> JobPlan:
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
    visible = None
    if backend.capabilities.starts_in_place:
        from llmctl.submit.environment_checks import visible_gpus

        visible = visible_gpus(context)
    size = node_size(spec, profile, visible, on_cpu=config is not None and config.training.device == "cpu")
    layout = _run_layout(context, session, spec, size, run_dir, submission=submission, cwd=cwd)
    image = image_of(spec, profile)
    mounts: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    container = None
    if image is not None:
        from llmctl.submit.container_mounts import own_mounts

        mounts, written = own_mounts(spec, profile, config, layout)
        container = plan_container(spec, profile, cwd=str(context.cwd), own_mounts=mounts)
    request = build_request(spec, profile, backend, size, name=run_dir.name, run_dir=str(run_dir), container=container)
    return JobPlan(
        spec=spec,
        config=config,
        profile=profile,
        folders=context.folders,
        is_remote=is_remote,
        backend=backend,
        queue=session.backend,
        request=request,
        layout=layout,
        image=image,
        visible_gpus=visible,
        own_mounts=mounts,
        new_folders=written if container is not None else (),
    )


def build_request(
    spec: JobSpec,
    profile: ClusterProfile,
    backend: Backend,
    size: NodeSize,
    *,
    name: str,
    run_dir: str,
    container: ContainerPlan | None = None,
) -> JobRequest:
    """The request to the scheduler.

    Args:
        spec: the user's job.
        profile: of the cluster.
        backend: of its scheduler.
        size: of each node.
        name: of the job: the run id.
        run_dir: the run directory, absolute.
        container: of the job; None for a job without a container.
    """
    defaults = profile.defaults
    kind = spec.resource_type or defaults.resource_type
    resource = profile.resource_types.get(kind or "")
    launcher = spec.launcher or profile.launch.launcher or backend.launchers[0]
    tasks = 1 if launcher == "torchrun" else size.ranks
    cores = resource.cores if resource is not None else None
    hosts = tuple(host for host in profile.hosts if host not in spec.exclude)
    return JobRequest(
        profile=profile,
        job_name=cast("QueueBackend", backend).job_name(name) if backend.capabilities.has_queue else name,
        run_dir=run_dir,
        nodes=spec.nodes,
        ranks_per_node=size.ranks,
        gpus_per_node=size.gpus,
        tasks_per_node=tasks,
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


def node_size(
    spec: JobSpec, profile: ClusterProfile, visible_gpus: Sequence[str] | None = None, *, on_cpu: bool = False
) -> NodeSize:
    """Size of each node, from the job or else from the kind of node.

    On this machine the visible GPUs are divided among the nodes.

    Args:
        spec: nodes, kind of node and ranks per node.
        profile: of the cluster.
        visible_gpus: GPUs of this machine, if this machine is the cluster; else None.
        on_cpu: True for a job without GPUs.
    """
    wanted = spec.gpus_per_node
    if visible_gpus is not None:
        if on_cpu or not visible_gpus:
            return NodeSize(1, 0)
        ranks = wanted or max(1, len(visible_gpus) // spec.nodes)
        starts = range(0, min(spec.nodes * ranks, len(visible_gpus)), ranks)
        return NodeSize(ranks, ranks, tuple(tuple(visible_gpus[start : start + ranks]) for start in starts))
    resource = profile.resource_types.get(spec.resource_type or profile.defaults.resource_type or "")
    if on_cpu or (resource is not None and not resource.gpus):
        return NodeSize(wanted or 1, 0)
    if resource is None:
        return NodeSize(wanted or 1, wanted or 0)
    return NodeSize(wanted or resource.gpus, wanted or resource.gpus)


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


def _run_layout(
    context: Context,
    session: ClusterSession,
    spec: JobSpec,
    size: NodeSize,
    run_dir: Path,
    *,
    submission: int,
    cwd: str | None,
) -> RunLayout:
    profile, is_remote = session.profile, session.transport.is_remote
    in_container = image_of(spec, profile) is not None and profile.container.runtime is not None
    if spec.code:
        working_dir = run_dir / "code" / "user"
    elif in_container and profile.container.workdir is not None:
        working_dir = Path(profile.container.workdir)
    else:
        working_dir = run_dir if is_remote else Path(cwd) if cwd is not None else context.cwd
    # Our own interpreter means nothing on another machine; a COMMAND needs Python only for the rendezvous.
    own_python = sys.executable if not is_remote else "python3" if spec.command else ""
    return RunLayout(
        run_id=run_dir.name,
        run_dir=run_dir,
        submission=submission,
        python=job_python(profile, context.folders, own_python, in_container=in_container),
        gpus=size.gpu_ids,
        ranks_per_node=size.ranks,
        working_dir=working_dir,
        secrets_file=Path(secrets_file(context, profile, run_dir, submission)) if spec.secrets else None,
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
