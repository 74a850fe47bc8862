"""Interactive sessions in the environment of a cluster's jobs or of one run."""

import hashlib
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from llmctl.backends import load_backend, load_queue_backend
from llmctl.backends.base import JobRequest
from llmctl.context import ClusterSession, Context, is_remote, resolve_profile_paths
from llmctl.errors import ProfileError, SchedulerError
from llmctl.paths import UserFolders, profile_files
from llmctl.site.container import ContainerPlan, plan_container
from llmctl.site.profile import ClusterProfile
from llmctl.submit.check_job import job_problems
from llmctl.submit.container_runtime import check_container_runtime
from llmctl.submit.decide import build_request, image_of, job_python
from llmctl.submit.job import Flag, Job
from llmctl.submit.render import HostRendezvous, interactive_script
from llmctl.submit.resolve import job_section, job_spec, recorded_job_spec, resolve
from llmctl.submit.snapshot import store_supervisor, store_trainer
from llmctl.submit.start_ssh import address_of_second
from llmctl.submit.visible_gpus import visible_gpus
from llmctl.supervisor.trust import OWN_FOLDER
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.protocol import Transport, transport_for

if TYPE_CHECKING:
    from llmctl.backends.base import QueueBackend
    from llmctl.operate.attach import Attachment
    from llmctl.transport.host_group import HostGroup

NAME = "llmctl-interactive"
"""Name of the scheduler's job."""


@dataclass(frozen=True)
class Session:
    """One command on the user's terminal.

    Attributes:
        transport: the machine that starts the command.
        argv: the command.
        cwd: working directory; None: the home directory.
        warning: a message for the user; may be empty.
        proof: file that the script on the node makes; None if no launcher stands between.
    """

    transport: Transport
    argv: Sequence[str]
    cwd: str | None
    warning: str = ""
    proof: str | None = None

    def run(self) -> int:
        """Run the command; returns its exit status, or 128 + N after signal N.

        Raises:
            SchedulerError: the launcher reports success although the node has not begun the command.
        """
        status = self.transport.run_interactive(self.argv, cwd=self.cwd)
        if self.proof is None:
            return status
        if status == 0 and not _exists(self.proof, self.transport):
            raise SchedulerError(
                "the node did not begin the command, although the scheduler reports success: its message is above\n"
                f"(the node would have made a file in {PurePosixPath(self.proof).parent}, which all nodes must see)",
                transient=False,
            )
        self.transport.remove([self.proof])
        return status


def new_session(context: Context, profile: ClusterProfile, flags: Sequence[Flag]) -> Session:
    """A shell, or the context's command, on a newly requested node; on this machine if there is no queue.

    Raises:
        UsageError, ConfigFileError, ProfileError: the request is invalid; names the flag or file.
        SchedulerError: the cluster cannot be reached.
    """
    profile = resolve_profile_paths(profile, context)
    transport = context.connect(profile)
    request = _request(context, ClusterSession(profile, transport, load_queue_backend(profile.scheduler)), flags)
    warning = check_container_runtime(profile, context, transport, request)
    code = _code(profile, transport, context.folders)
    own_dir = code.parents[1]
    rendezvous = None
    if len(request.hosts) > 1:
        # The shell is on the first host, as the head node of a run is.
        rendezvous = _rendezvous(request, own_dir, context, transport_for(transport, request.hosts))
        transport = transport_for(transport, request.hosts[:1])
    container = _without_import(request.container, transport)
    script = interactive_script(
        profile,
        context.folders,
        _python(profile, context, container),
        on_cpu=not request.gpus_per_node,
        resource_type=request.resource_type,
        code=None if context.command and not _names_trainer(context.command) else code,
        container=container,
        supervisor_dir=_supervisor(profile, transport, context.folders) if container is not None else None,
        own_dir=own_dir,
        rendezvous=rendezvous,
    )
    # The script itself enters the other runtimes, after loading the modules that they may need.
    inside = container if container is not None and container.runtime == "pyxis" else None
    backend = load_backend(profile.scheduler)
    proof = _new_proof(str(profile.runs_root)) if backend.capabilities.has_queue else None
    argv = backend.interactive_argv(replace(request, container=inside), _proving(script, proof), context.command)
    return Session(transport, argv, _cwd(context, profile), warning, proof)


def attach_session(context: Context, profile: ClusterProfile, attachment: "Attachment") -> Session:
    """A shell, or the context's command, on a run's node, in its environment."""
    profile = resolve_profile_paths(profile, context)
    if attachment.place is not None:
        check_ssh(attachment.record.job, profile)
    container, warning = _container_of(attachment, profile, context)
    backend = load_backend(profile.scheduler)
    script = interactive_script(
        profile,
        context.folders,
        _python(profile, context, container),
        on_cpu=attachment.is_on_cpu or (backend.capabilities.starts_in_place and not visible_gpus(context)),
        resource_type=attachment.record.job.get("resource_type") or profile.defaults.resource_type,
        run_id=attachment.record.run_id,
        run_dir=attachment.record.run_dir,
        code=attachment.record.run_dir / "code" if attachment.record.config is not None else None,
        env=tuple(attachment.variables.items()),
        container=container,
        supervisor_dir=attachment.record.run_dir / "code" / "supervisor",
        own_dir=attachment.record.run_dir / OWN_FOLDER,
    )
    transport = context.connect(profile)
    proof = None
    if attachment.place is None or not backend.capabilities.has_queue:
        request = JobRequest(profile, job_name=NAME, run_dir=str(attachment.record.run_dir))
        argv = backend.interactive_argv(request, script, context.command)
        if attachment.place is not None:
            transport = cast("HostGroup", transport).called(attachment.place.host)
    else:
        visiting = cast("QueueBackend", backend).attach_argv
        cores = _cores_of(attachment, profile)
        # The script itself enters the other runtimes.
        inside = container if container is not None and container.runtime == "pyxis" else None
        proof, place = _new_proof(str(attachment.record.run_dir.parent)), attachment.place
        proving = _proving(script, proof)
        argv = visiting(place.job_id, place.host, proving, context.command, inside, cores=cores)
    return Session(transport, argv, _cwd(context, profile), warning, proof)


def check_ssh(job: Mapping[str, Any], profile: ClusterProfile) -> None:
    """Refuse ``interactive --run`` on nodes that users cannot reach by ssh.

    Raises:
        ProfileError: names the kind of node.
    """
    kind = job.get("resource_type") or profile.defaults.resource_type
    resource = profile.resource_types.get(kind or "")
    if resource is not None and not resource.ssh:
        raise ProfileError(
            f"{profile.name} offers no ssh to nodes of {kind}, which interactive --run needs\n"
            f"llmctl interactive --cluster {profile.name} --resource-type {kind} asks for a new node"
        )


def _new_proof(root: str) -> str:
    """Path of a file that proves that a node has begun: in ``root``, which all nodes see, and never used before."""
    return f"{root}/.begun-{secrets.token_hex(8)}"


def _proving(script: str, proof: str | None) -> str:
    """The script, which first makes the file ``proof``: srun may exit with 0 without having started anything."""
    return script if proof is None else f"{{ : >{shlex.quote(proof)}; }} 2>/dev/null\n{script}"


def _exists(path: str, transport: Transport) -> bool:
    (facts,) = transport.stat_paths([path])
    # Reading the folder makes a network file system refresh its cache.
    place = PurePosixPath(path)
    return facts.kind == "file" or place.name in transport.list_names([str(place.parent)])[0]


def _container_of(
    attachment: "Attachment", profile: ClusterProfile, context: Context
) -> tuple[ContainerPlan | None, str]:
    """The container for a shell beside a run, with a warning unless the ranks share it.

    pyxis can join a running container by its name. The other runtimes start another container of the same image, which
    still sees the node's processes.
    """
    if attachment.place is None:
        return None, ""
    job, own_mounts = recorded_job_spec(attachment.record), (str(attachment.record.run_dir.parent),)
    plan = plan_container(job, profile, cwd=attachment.record.cwd or str(context.cwd), own_mounts=own_mounts)
    if plan is not None and plan.runtime == "pyxis" and profile.container.name is None:
        return None, (
            "on the node itself, without the image's software: pyxis joins a container by its name only; "
            f"set container.name in {profile_files(context.folders, profile.name)[-1]} for the next run"
        )
    return plan, ""


def _cores_of(attachment: "Attachment", profile: ClusterProfile) -> int | None:
    """Cores per node of a run's job."""
    spec = recorded_job_spec(attachment.record)
    backend = load_backend(profile.scheduler)
    return build_request(spec, profile, backend, name=NAME, run_dir="", on_cpu=attachment.is_on_cpu).cores_per_node


def _names_trainer(command: Sequence[str]) -> bool:
    """True if a COMMAND runs our trainer; another may have its own package of this name."""
    return ("-m", "trainer") in pairwise(" ".join(command).split())


def _request(context: Context, session: ClusterSession, flags: Sequence[Flag]) -> JobRequest:
    """Build the job request, with the checks of a submission."""
    profile = session.profile
    backend = load_backend(profile.scheduler)
    resolved = resolve(context, session, None, flags, job_only=True)
    spec = job_spec(resolved, job_section(resolved), NAME)
    root = str(profile.runs_root)
    if backend.capabilities.starts_in_place:
        return JobRequest(profile, job_name=NAME, run_dir=root, gpus_per_node=len(visible_gpus(context)))
    container = plan_container(spec, profile, cwd=str(context.cwd), own_mounts=(root,))
    request = build_request(spec, profile, backend, name=NAME, run_dir=root, container=container)
    job = Job(
        spec=spec,
        request=request,
        backend=backend,
        folders=context.folders,
        is_remote=session.transport.is_remote,
        is_interactive=True,
        image=image_of(spec, profile),
    )
    problems = job_problems(job)
    if problems:
        raise resolved.error(problems)
    return request


def _without_import(container: ContainerPlan | None, transport: Transport) -> ContainerPlan | None:
    """Drop a missing pyxis import. pyxis itself fetches the image, before any script of ours runs."""
    if container is None or container.runtime != "pyxis" or container.imported is None:
        return container
    (facts,) = transport.stat_paths([container.imported])
    return container if facts.kind == "file" else replace(container, imported=None)


def _code(profile: ClusterProfile, transport: Transport, folders: UserFolders) -> Path:
    """Folder with the trainer that jobs use; makes the code snapshot if missing."""
    root = Path(str(profile.runs_root))
    try:
        return store_trainer(root, transport, folders)
    except OSError as error:
        raise ProfileError(f"{profile.name}: runs_root: {root} cannot be written: {error}") from None


def _rendezvous(request: JobRequest, own_dir: Path, context: Context, transport: Transport) -> HostRendezvous:
    """The hosts of a session; writes their hostfile, which all sessions on the same hosts share."""
    lines = "".join(f"{host} slots={request.ranks_per_node}\n" for host in request.hosts).encode()
    hostfile = f"{own_dir}/hostfiles/{hashlib.sha256(lines).hexdigest()[:16]}"
    try:
        transport.write_files([FileWrite(hostfile, lines)])
    except OSError as error:
        raise ProfileError(f"{request.profile.name}: {hostfile} cannot be written: {error.strerror}") from None
    second = address_of_second(request, context.environment) or request.hosts[1].rpartition("@")[2]
    return HostRendezvous(request.nodes, second, hostfile)


def _supervisor(profile: ClusterProfile, transport: Transport, folders: UserFolders) -> Path:
    """The supervisor on the cluster's machine, which imports images."""
    root = Path(str(profile.runs_root))
    try:
        return store_supervisor(root, transport, folders)
    except OSError as error:
        raise ProfileError(f"{profile.name}: runs_root: {root} cannot be written: {error}") from None


def _python(profile: ClusterProfile, context: Context, container: ContainerPlan | None) -> str:
    own = "python3" if is_remote(profile) else sys.executable
    return job_python(profile, context.folders, own, in_container=container is not None)


def _cwd(context: Context, profile: ClusterProfile) -> str | None:
    return None if is_remote(profile) else os.fspath(context.cwd)
