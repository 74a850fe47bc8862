"""The environment of a cluster's jobs, or of one run, for a person: what a shell in it is given, and where it is."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmctl.backends import load_backend
from llmctl.backends.base import JobRequest
from llmctl.container import ContainerPlan, plan_container
from llmctl.container_checks import check_container
from llmctl.errors import ProfileError
from llmctl.gpus import visible_gpus
from llmctl.hands import Hands
from llmctl.invocation import Invocation, is_remote
from llmctl.job import JobSpec
from llmctl.job_request import build_request, check_group, launcher_of, resource_type_of, size_of_node
from llmctl.profile import ClusterProfile
from llmctl.profile_names import profile_files
from llmctl.render import interactive_script, job_python
from llmctl.resolve import Flag, resolve
from llmctl.settled_profile import settle_profile
from llmctl.site_limits import check_limits
from llmctl.snapshot import store_own_code, store_supervisor
from llmctl.software_probes import check_container_runtime
from llmctl.submit_checks import check_job, check_job_section, check_offered

if TYPE_CHECKING:
    from llmctl.backends.base import QueueBackend
    from llmctl.host_group import HostGroup
    from llmctl.run_visit import RunVisit

NAME = "llmctl-interactive"
"""Of the scheduler's job."""


@dataclass(frozen=True)
class Session:
    """One command for a person's terminal.

    Attributes:
        hands: the machine it is started on.
        argv: the command.
        cwd: where it is started; None: the home directory.
        remark: what the person should know; may be empty.
    """

    hands: Hands
    argv: Sequence[str]
    cwd: str | None
    remark: str = ""

    def run(self) -> int:
        """Exit status of the command, 128 + N when signal N ended it."""
        return self.hands.run_interactive(self.argv, cwd=self.cwd)


def new_session(invocation: Invocation, profile: ClusterProfile, flags: Sequence[Flag]) -> Session:
    """A shell, or the command of the invocation, on a node that is asked for; on this machine where there is no queue.

    Raises:
        UsageError, ConfigFileError, ProfileError: what is asked for cannot be, by flag or file.
        SchedulerError: the cluster cannot be reached.
    """
    profile = settle_profile(profile, invocation)
    request = _request(invocation, profile, flags)
    hands = invocation.connect(profile)
    remark = check_container_runtime(profile, invocation, hands, request)
    container = _without_import(request.container, hands)
    script = interactive_script(
        profile,
        invocation.folders,
        _python(profile, invocation, container),
        on_cpu=not request.gpus_per_node,
        resource_type=request.resource_type,
        env=tuple(_code_variables(invocation, profile, hands).items()),
        container=container,
        supervisor_dir=_supervisor(profile, hands) if container is not None else None,
    )
    # The other runtimes are entered by the script itself, once the modules that they may need are loaded.
    inside = container if container is not None and container.runtime == "pyxis" else None
    backend = load_backend(profile.scheduler)
    argv = backend.interactive_argv(replace(request, container=inside), script, invocation.command)
    return Session(hands, argv, _cwd(invocation, profile), remark)


def visit_session(invocation: Invocation, profile: ClusterProfile, visit: "RunVisit") -> Session:
    """A shell, or the command of the invocation, in the environment of a run, and beside it where it runs."""
    profile = settle_profile(profile, invocation)
    if visit.place is not None:
        check_ssh(visit.record.job, profile)
    container, remark = _container_of(visit, profile, invocation)
    script = interactive_script(
        profile,
        invocation.folders,
        _python(profile, invocation, container),
        on_cpu=visit.is_on_cpu or (profile.scheduler == "local" and not visible_gpus(invocation)),
        resource_type=visit.record.job.get("resource_type") or profile.defaults.resource_type,
        run_id=visit.record.run_id,
        run_dir=visit.record.run_dir,
        env=tuple(visit.variables.items()),
        container=container,
        supervisor_dir=visit.record.run_dir / "code" / "supervisor",
    )
    backend = load_backend(profile.scheduler)
    hands = invocation.connect(profile)
    if visit.place is None or not backend.has_queue:
        request = JobRequest(profile, job_name=NAME, run_dir=str(visit.record.run_dir))
        argv = backend.interactive_argv(request, script, invocation.command)
        if visit.place is not None:
            hands = cast("HostGroup", hands).called(visit.place.host)
    else:
        visiting = cast("QueueBackend", backend).visit_argv
        cores = _cores_of(visit, profile)
        # The other runtimes are entered by the script itself.
        inside = container if container is not None and container.runtime == "pyxis" else None
        argv = visiting(visit.place.job_id, visit.place.host, script, invocation.command, inside, cores=cores)
    return Session(hands, argv, _cwd(invocation, profile), remark)


def check_ssh(job: Mapping[str, Any], profile: ClusterProfile) -> None:
    """Refuse to visit nodes that the site keeps its users from.

    Raises:
        ProfileError: says which kind of node it is.
    """
    kind = job.get("resource_type") or profile.defaults.resource_type
    resource = profile.resource_types.get(kind or "")
    if resource is not None and not resource.ssh:
        raise ProfileError(
            f"ssh to nodes of {kind} is not offered on {profile.name}, and a run is visited by it\n"
            f"llmctl interactive --cluster {profile.name} --resource-type {kind} asks for a node of its own"
        )


def _container_of(
    visit: "RunVisit", profile: ClusterProfile, invocation: Invocation
) -> tuple[ContainerPlan | None, str]:
    """The container that a visitor of a run is in, and what to say where it is not that of the ranks.

    pyxis lets a running one be joined by its name; with the other runtimes it is one more of the same image, which sees
    the node's processes all the same.
    """
    if visit.place is None:
        return None, ""
    job, own_mounts = JobSpec.from_plain(visit.record.job), (str(visit.record.run_dir.parent),)
    plan = plan_container(job, profile, cwd=visit.record.cwd or str(invocation.cwd), own_mounts=own_mounts)
    if plan is not None and plan.runtime == "pyxis" and profile.container.name is None:
        return None, (
            "on the node itself, without the image's software: pyxis joins a container by its name only; "
            f"set container.name in {profile_files(invocation.folders, profile.name)[-1]} for the next run"
        )
    return plan, ""


def _cores_of(visit: "RunVisit", profile: ClusterProfile) -> int | None:
    """The cores that a run's job has on each node."""
    job = JobSpec.from_plain(visit.record.job)
    resource = profile.resource_types.get(resource_type_of(job, profile) or "")
    if resource is None:
        return None
    ranks = job.gpus_per_node or (0 if visit.is_on_cpu else resource.gpus) or 1
    launcher = launcher_of(job, profile)
    return JobRequest(
        profile, NAME, "", ranks_per_node=ranks, cores_per_node=resource.cores, launcher=launcher
    ).cores_granted


def code_variables(code: str, environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with a folder of code before what is there."""
    return {"PYTHONPATH": ":".join(path for path in (code, environ.get("PYTHONPATH", "")) if path)}


def _request(invocation: Invocation, profile: ClusterProfile, flags: Sequence[Flag]) -> JobRequest:
    """What is asked for, checked as for a submission."""
    resolved = resolve(invocation, profile, None, flags, job_only=True)
    job: JobSpec = check_job(resolved, check_job_section(resolved), NAME)
    check_offered(resolved, job, profile)
    root = str(profile.runs_root)
    if profile.scheduler == "local":
        return JobRequest(profile, job_name=NAME, run_dir=root, gpus_per_node=len(visible_gpus(invocation)))
    check_group(job, profile, invocation.folders)
    check_container(resolved, job, profile, invocation.folders)
    check_limits(resolved, job, profile, is_interactive=True)
    ranks_per_node, gpus_per_node = size_of_node(resolved, job, profile, False)
    return build_request(
        job,
        profile,
        run_id=NAME,
        run_dir=root,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        own_mounts=(root,),
        cwd=str(invocation.cwd),
    )


def _without_import(container: ContainerPlan | None, hands: Hands) -> ContainerPlan | None:
    """With pyxis nothing of ours runs before the container does: an image that is not imported yet pyxis fetches."""
    if container is None or container.runtime != "pyxis" or container.imported is None:
        return container
    (facts,) = hands.look_at([container.imported])
    return container if facts.kind == "file" else replace(container, imported=None)


def _code_variables(invocation: Invocation, profile: ClusterProfile, hands: Hands) -> dict[str, str]:
    """The trainer as jobs find it, from a snapshot that is made where there is none yet."""
    root = Path(str(profile.runs_root))
    try:
        code = store_own_code(root, hands)[1]
    except OSError as error:
        raise ProfileError(f"{profile.name}: runs_root: {root} cannot be written: {error}") from None
    return code_variables(str(code), {} if is_remote(profile) else invocation.environment)


def _supervisor(profile: ClusterProfile, hands: Hands) -> Path:
    """The supervisor on the cluster's machine, which imports images."""
    root = Path(str(profile.runs_root))
    try:
        return store_supervisor(root, hands)
    except OSError as error:
        raise ProfileError(f"{profile.name}: runs_root: {root} cannot be written: {error}") from None


def _python(profile: ClusterProfile, invocation: Invocation, container: ContainerPlan | None) -> str:
    own = "python3" if is_remote(profile) else sys.executable
    return job_python(profile, invocation.folders, own, in_container=container is not None)


def _cwd(invocation: Invocation, profile: ClusterProfile) -> str | None:
    return None if is_remote(profile) else os.fspath(invocation.cwd)
