"""Job scripts by Jinja2: Job -> RenderedJob, quoted for the shell. job.json, for the supervisor, goes with them."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from jinja2 import (
    Environment,
    FileSystemBytecodeCache,
    FileSystemLoader,
    StrictUndefined,
    TemplateError,
    TemplateSyntaxError,
    UndefinedError,
)
from jinja2.bccache import Bucket

from llmctl import __version__
from llmctl.backends import capabilities_of
from llmctl.backends.base import Capabilities
from llmctl.errors import ConfigFileError
from llmctl.paths import BUNDLED, UserFolders, expand_home, search_path
from llmctl.site.job import DEFAULT_EVENTS, DEFAULT_RESTARTS
from llmctl.site.profile import ClusterProfile
from llmctl.submit.job import Job, RenderedJob
from llmctl.supervisor.settings import ChainSettings, JobSettings

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan
    from llmctl.site.torchrun import TorchrunWords

OWN_VARIABLES = frozenset(
    {
        *(
            "LLMCTL_RUN_ID",
            "LLMCTL_RUN_DIR",
            "LLMCTL_ATTEMPT",
            "LLMCTL_ATTEMPT_DIR",
            "LLMCTL_HOSTFILE",
            "LLMCTL_USER_DIR",
            "LLMCTL_PYTHON",
        ),
        *("LLMCTL_NODE", "LLMCTL_MASTER_PORT", "LLMCTL_ENVIRONMENT", "LLMCTL_GPUS"),
        *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES"),
    }
)
"""Variables of the contract between job.sh and the trainer; users cannot set them."""

# glibc returns freed blocks of this size to the kernel and faults them in again at every step; keeping them made
# training on CPU several times faster (measured on 2 cores, glibc 2.36).
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
}


class Raw(str):
    """Text that a template prints unquoted, by the filter ``| raw``."""


class TemplateCache(FileSystemBytecodeCache):
    """Compiled templates in ``__pycache__`` beside the bundled templates.

    Compiling a job script costs 20 of the 210 ms of a dry run (Zen 4). Jinja uses a cached template only if the same
    versions of Python and Jinja compiled it from the same text. A cache that cannot be read or written is skipped.
    """

    def __init__(self, templates: Path, *, may_write: bool) -> None:
        """Cache the templates of a folder; without ``may_write`` the cache is only read."""
        super().__init__(str(templates / "__pycache__"), "%s.jinja")
        self._may_write = may_write

    def load_bytecode(self, bucket: Bucket) -> None:
        """Load a compiled template if the cache holds a readable one."""
        with suppress(OSError, EOFError, ValueError, TypeError, UnpicklingError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store a compiled template if the folder is writable."""
        if not self._may_write:
            return
        with suppress(OSError):
            Path(self.directory).mkdir(exist_ok=True)
            super().dump_bytecode(bucket)


@dataclass(frozen=True)
class HostRendezvous:
    """The hosts of an interactive session on several hosts, which its shell is told.

    Attributes:
        nodes: number of hosts; the session's shell is on the first.
        second_host: name or address of the second host, for the address of the first as the others reach it.
        hostfile: path on the hosts of a file with one line per host.
    """

    nodes: int
    second_host: str
    hostfile: str


def render(job: Job, *, template: Mapping[str, str] | None = None) -> RenderedJob:
    """Render a job. Pure except for reading templates: the same arguments give the same bytes.

    Args:
        job: with every value decided.
        template: ``path`` and ``text`` of a template in place of the scheduler's own.

    Raises:
        ConfigFileError: a template of the user is wrong; names file and line.
    """
    profile, request, spec = job.profile, job.request, job.spec
    directives = job.queue.directives(request) if job.queue is not None else []
    commands = tuple(job.backend.submit_commands(request))
    on_cpu = not (request.gpu_ids or request.gpus_per_node)
    environment = job_environment(profile, request.resource_type, on_cpu=on_cpu) | dict(spec.env)
    stop_after_s = _stop_after_s(job)
    variables = {
        **_software(profile, job.folders),
        "version": __version__,
        "run_id": job.run_id,
        "run_dir": job.run_dir,
        "submission": job.submission,
        "nodes": spec.nodes,
        "spare_nodes": request.spare_nodes,
        "ranks_per_node": request.ranks_per_node,
        "python": job.python,
        "ports": profile.rendezvous.ports,
        "stop_grace_s": profile.stop_grace_s,
        "stop_after_s": stop_after_s,
        "request": request,
        "directives": directives,
        "launcher": request.launcher,
        "launch": profile.launch,
        "mpirun_carries_environment": _mpirun_carries(job),
        "port_rule": profile.rendezvous.port_rule,
        "interface": profile.rendezvous.interface,
        "container": request.container,
        "hosts": request.hosts,
        "gpus": request.gpu_ids,
        "command": spec.command,
        "torchrun": _torchrun(job),
        "working_dir": job.working_dir,
        "secrets_file": job.secrets_file,
        "secrets": spec.secrets,
        # Our variables and secrets win over variables of the same name.
        "env": [(name, value) for name, value in environment.items() if name not in {*OWN_VARIABLES, *spec.secrets}],
        "has_own_caches": _has_own_caches(job.backend.capabilities),
    }
    script = _fill(job.folders, job.backend.template, variables, template)
    return RenderedJob(script, job.run_dir / "job.sh", commands, _settings(job, stop_after_s))


def _torchrun(job: Job) -> "TorchrunWords | None":
    """The interpreter and the program that torchrun starts in the place of the trainer."""
    if not job.spec.torchrun:
        return None
    from llmctl.site.torchrun import torchrun_words

    return torchrun_words(job.spec.command, job.python)


def _settings(job: Job, stop_after_s: int) -> str:
    """Text of job.json: the values of one submission that the supervisor needs (see llmctl/supervisor/settings.py)."""
    profile, request, capabilities = job.profile, job.request, job.backend.capabilities
    rule, secrets = profile.rendezvous.port_rule, job.secrets_file
    is_local = capabilities.starts_in_place
    settings = JobSettings(
        run_id=job.run_id,
        run_dir=str(job.run_dir),
        submission=job.submission,
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node,
        is_training=not job.spec.command,
        one_process_per_rank=request.launcher in ("srun", "mpirun") and not job.spec.command,
        ports=profile.rendezvous.ports,
        port_rule=(rule.base, rule.modulo) if rule is not None else None,
        stop_grace_s=profile.stop_grace_s,
        stop_after_s=stop_after_s,
        secrets_file=str(secrets) if secrets is not None else None,
        secrets_are_read_once=is_local,
        hosts=request.hosts if request.launcher != "mpirun" else (),
        shared=profile.shared,
        in_image=request.container is not None,
        forgets_launchers=is_local,
        # A flag may repeat a place of the config.
        notify=tuple(dict.fromkeys(job.spec.notify)),
        points_per_node_hour=job.cost.rate if job.cost is not None else None,
        points_unit=job.cost.unit if job.cost is not None else "",
        notify_on=DEFAULT_EVENTS if job.spec.notify_on is None else job.spec.notify_on,
        max_restarts=job.spec.max_restarts,
        restart_on=DEFAULT_RESTARTS if job.spec.restart_on is None else job.spec.restart_on,
        hang_timeout_s=job.spec.hang_timeout_s or 0,
        spare_nodes=request.spare_nodes,
        copy_folder=(job.config.checkpoint.copy_folder or "") if job.config is not None else "",
    )
    chain = chain_settings(job)
    return json.dumps({**settings._asdict(), "chain": None if chain is None else chain._asdict()}, indent=1) + "\n"


def chain_settings(job: Job) -> ChainSettings | None:
    """Values by which the jobs of a run submit each other; None for a run of one job."""
    if job.spec.chain is None or job.queue is None:
        return None
    limits = dict(job.spec.chain)
    return ChainSettings(
        argv=job.queue.next_job_argv(job.request),
        time_s=job.request.time_s or 0,
        until=int(limits.get("until", 0)),
        points=limits.get("points"),
        node_hours=limits.get("node_hours"),
    )


def _stop_after_s(job: Job) -> int:
    """Seconds until the run is asked to stop, before a scheduler ends the job at its limit; 0 disables the request."""
    time_s = job.request.time_s
    if time_s is None:
        return 0
    return max(time_s - job.profile.stop_grace_s, time_s // 2) if job.queue is not None else time_s


def _mpirun_carries(job: Job) -> bool:
    """True if mpirun's launcher on the nodes (srun, tm, qrsh -V) passes the environment on; ssh does not."""
    stated = job.profile.launch.mpirun_carries_environment
    return stated if stated is not None else job.backend.capabilities.mpirun_carries_environment


def interactive_script(
    profile: ClusterProfile,
    folders: UserFolders,
    python: str,
    *,
    on_cpu: bool,
    resource_type: str | None = None,
    run_id: str | None = None,
    run_dir: Path | None = None,
    code: Path | None = None,
    env: tuple[tuple[str, str], ...] = (),
    container: "ContainerPlan | None" = None,
    supervisor_dir: Path | None = None,
    own_dir: Path | None = None,
    rendezvous: HostRendezvous | None = None,
) -> str:
    """Script that runs its arguments, or else a shell, in the environment of a cluster's jobs.

    Args:
        profile: of the cluster.
        folders: the user's folders.
        python: the interpreter of the jobs.
        on_cpu: True without GPUs.
        resource_type: the kind of node; None if the site has no kinds.
        run_id: of the run whose code and variables the script sets; None without a run.
        run_dir: directory of the run.
        code: folder with our trainer, for PYTHONPATH; None for a COMMAND, which may have another package trainer.
        env: further variables, such as the run's own.
        container: container of the script. pyxis runs the script inside; the script itself enters other containers.
        supervisor_dir: the supervisor on the cluster's machine, which may have to import an image first.
        own_dir: the user's own folder beside the runs, for caches; None: caches are where the user has them.
        rendezvous: of a session on several hosts; None for one host, or where the scheduler has its own variables.
    """
    environment = job_environment(profile, resource_type, on_cpu=on_cpu) | dict(env)
    variables = {
        **_software(profile, folders),
        "container": container,
        "run_id": run_id,
        "run_dir": run_dir,
        "code": code,
        "supervisor_dir": supervisor_dir,
        "python_dir": Path(python).parent,
        "env": list(environment.items()),
        "has_own_caches": own_dir is not None and _has_own_caches(capabilities_of(profile.scheduler)),
        "own_dir": own_dir,
        "python": python,
        "rendezvous": rendezvous,
        "ports": profile.rendezvous.ports,
        "port_rule": profile.rendezvous.port_rule,
        "interface": profile.rendezvous.interface,
    }
    return _fill(folders, "interactive.sh.j2", variables)


def environment_script(profile: ClusterProfile, folders: UserFolders) -> str:
    """Script that runs its arguments in the software environment of a cluster's jobs; exits with their status."""
    variables = {**_software(profile, folders), "env": list(profile.env.items()), "has_own_caches": False}
    return _fill(folders, "environment.sh.j2", variables)


def job_environment(profile: ClusterProfile, resource_type: str | None, *, on_cpu: bool) -> dict[str, str]:
    """Variables of every job on one kind of node; the variables of the kind win over the profile's."""
    kind = profile.resource_types.get(resource_type or "")
    own = kind.env if kind is not None else {}
    return {**(CPU_ENVIRONMENT if on_cpu else {}), **profile.env, **own}


def _has_own_caches(capabilities: Capabilities) -> bool:
    """True if jobs have caches beside the runs; jobs on this machine use the user's other caches."""
    return not capabilities.starts_in_place


def _software(profile: ClusterProfile, folders: UserFolders) -> dict[str, Any]:
    software = profile.environment
    return {
        "modules": software.modules,
        "module_init": software.module_init,
        "setup": software.setup,
        "kind": software.kind,
        "path": None if software.path is None or software.kind == "container" else expand_home(software.path, folders),
    }


def compile_templates() -> None:
    """Compile the bundled templates when a checkout is set up; templates that are up to date stay."""
    folder = BUNDLED / "templates"
    environment = _environment((folder,), TemplateCache(folder, may_write=True))
    for path in sorted(folder.glob("*.j2")):
        environment.get_template(path.name)


def _fill(
    folders: UserFolders, template: str, variables: dict[str, Any], given: Mapping[str, str] | None = None
) -> str:
    users, ours = search_path(folders, "templates")
    own = Path(template)
    brought = (own.parent,) if own.is_absolute() else ()
    environment = _environment((users, *brought, ours), TemplateCache(ours, may_write=not sys.dont_write_bytecode))
    try:
        if given is None:
            return environment.get_template(own.name).render(variables)
        template = given["path"]
        return environment.from_string(given["text"]).render(variables)
    except UndefinedError as error:
        where = _place_of(error, template)
        raise ConfigFileError(f"{where}: {error.message}; valid names: {', '.join(sorted(variables))}") from None
    except TemplateError as error:
        raise ConfigFileError(f"{_place_of(error, template)}: {error.message}") from None


def _place_of(error: TemplateError, template: str) -> str:
    """FILE:LINE of the innermost template on the traceback of an error."""
    if isinstance(error, TemplateSyntaxError):
        return f"{error.filename or template}:{error.lineno}"
    place, trace = template, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.endswith(".j2") or code.co_filename == "<template>":
            name = template if code.co_filename == "<template>" else code.co_filename
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _environment(folders: Sequence[Path], cache: TemplateCache) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(folders),
        bytecode_cache=cache,
        undefined=StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Bash itself uses {#, as in ${#array[@]}.
        comment_start_string="{*",
        comment_end_string="*}",
        optimized=False,
        auto_reload=False,
    )
    environment.filters["raw"] = Raw
    return environment


def _quoted(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if value is None:
        # Jinja would print the word None.
        raise TypeError("a template prints a value that is not set")
    # A line of a value must not look like a line of the script: Grid Engine reads "#$" anywhere.
    return "$'\\n'".join(shlex.quote(line) for line in str(value).split("\n"))
