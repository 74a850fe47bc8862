"""ClusterProfile: one site's offer, from clusters/NAME.yaml and the user's overlay of the same name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from llmctl.errors import ProfileError
from llmctl.paths import UserFolders, profile_files
from llmctl.site.job import VARIABLE, WORD, WORD_RULE, JobError, parse_time

SCHEDULERS = ("slurm", "sge", "pbs", "lsf", "ssh", "local")
"""Valid names for ``scheduler:``, besides those of installed packages; llmctl.backends has one row for each."""


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_time(value)
        except JobError as error:
            raise ValueError(error.problem) from None
    return value


def _variable_names(env: dict[str, str]) -> dict[str, str]:
    wrong = next((name for name in env if not VARIABLE.fullmatch(name)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} cannot be the name of a variable")
    return env


def _word(value: str) -> str:
    if not WORD.fullmatch(value):
        raise ValueError(WORD_RULE)
    return value


_TIME_TEXT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})
Time = Annotated[int | None, BeforeValidator(_seconds), _TIME_TEXT]
"""Seconds; files write them as ``H:M:S``."""
Variables = Annotated[dict[str, str], AfterValidator(_variable_names)]
"""Variable names and values."""
Word = Annotated[str, AfterValidator(_word)]
"""A name that a directive holds without quotes, as a job's own words."""
# pydantic's "$" matches at the end of the text only, unlike that of Python's re, which allows a newline there.
Line = Annotated[str, Field(pattern=r"^[^\x00\r\n]*$")]
"""One line of a job script, printed unchanged."""
SshName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]{0,254}$")]
"""A machine as the ssh command knows it; cannot be taken for an option of ssh."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class EnvironmentProfile(_Part):
    """The Python environment of jobs."""

    modules: tuple[str, ...] = ()
    """Environment modules to load, in order."""
    kind: Literal["venv", "conda", "container"] | None = None
    """Kind of the environment at ``path``. Unset: the Python of the node."""
    path: str | None = None
    """Folder of the virtual or conda environment; for a container, the image."""
    module_init: str | None = None
    """File that defines the ``module`` function if batch shells lack it. Unset: the usual places are searched."""
    python: str | None = None
    """The interpreter. Unset: the environment's; without an environment, on this machine, llmctl's."""
    setup: tuple[str, ...] = ()
    """Shell lines, run unchanged after the modules are loaded and before the environment is activated."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind is None) != (self.path is None):
            raise ValueError("kind and path go together: set both or neither")
        return self


class PortRule(_Part):
    """A site's published rule for the rendezvous port: ``base + job id % modulo``."""

    base: int = Field(gt=0, lt=65536)
    """First port of the rule."""
    modulo: int = Field(gt=0, lt=65536)
    """Number of ports of the rule."""


class RendezvousProfile(_Part):
    """Rendezvous of a job's ranks: interface and ports."""

    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,31}$")
    """Network interface of the head node's IPv4 address. Unset: the interface towards the other nodes."""
    ports: tuple[int, int] = (20000, 29999)
    """First and last port to try. Below Linux's ephemeral ports, so that no client socket uses them."""
    port_rule: PortRule | None = None
    """First port to try. Unset: a port in ``ports``, chosen by job id."""

    @field_validator("ports")
    @classmethod
    def _check_range(cls, ports: tuple[int, int]) -> tuple[int, int]:
        if not 0 < ports[0] <= ports[1] < 65536:
            raise ValueError("give the first and the last port, from 1 to 65535, as in [20000, 29999]")
        return ports


class LoginProfile(_Part):
    """Machine that runs the cluster's commands. Without ``host``, this machine is a login node."""

    host: SshName | None = None
    """As the ssh command knows the host: a name, an alias of ~/.ssh/config or user@name."""
    proxy_jump: SshName | None = None
    """Jump host, if ~/.ssh/config names none."""
    python: str | None = None
    """Python 3.7 or later on the login node. Unset: the first one found there."""


class ResourceType(_Part):
    """One kind of node, under the site's name for it."""

    gpus: int = Field(default=0, ge=0)
    """GPUs per node; for a fractional type, GPUs of the fraction."""
    cores: int | None = Field(default=None, gt=0)
    """Cores per node, as the scheduler counts them."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory per node in GiB."""
    fraction: bool = False
    """True for a part of a node: one such part per job, with other jobs on the same node."""
    max_nodes: int | None = Field(default=None, gt=0)
    """Nodes that a job may have."""
    max_time: Time = None
    """Longest time limit, as ``H:M:S``."""
    max_node_hours: float | None = Field(default=None, gt=0)
    """Nodes times hours that a job may ask for."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one GPU in GiB."""
    gpu: str | None = None
    """Common GPU name, such as H200; doctor compares this GPU with the architectures of torch's build."""
    gpu_type: Word | None = None
    """The scheduler's name of the GPU, if required (Slurm: ``--gpus-per-node=TYPE:N``)."""
    queue: Word | None = None
    """Queue or partition of this kind of node."""
    points_per_hour: float | None = Field(default=None, ge=0)
    """Cost of one node for one hour, in the site's units."""
    options: tuple[Line, ...] = ()
    """Further directives for jobs on this kind of node, one line each, without the scheduler's prefix."""
    env: Variables = {}
    """Variables of jobs on this kind of node; they override the cluster's."""
    ssh: bool = True
    """PBS: true if users can ssh to the nodes of their own jobs, as ``interactive --run`` needs."""


class QueueLimits(_Part):
    """Limits of one queue, partition or kind of job; they override the general limits."""

    max_nodes: int | None = Field(default=None, gt=0)
    """Nodes that a job may have."""
    max_time: Time = None
    """Longest time limit, as ``H:M:S``."""
    max_node_hours: float | None = Field(default=None, gt=0)
    """Nodes times hours that a job may ask for."""


class LimitsProfile(_Part):
    """The site's limits. Reservations have their own rules, so these limits do not apply to reservations."""

    max_nodes: int | None = Field(default=None, gt=0)
    """Nodes that a job may have."""
    max_time: Time = None
    """Longest time limit, as ``H:M:S``."""
    max_node_hours: float | None = Field(default=None, gt=0)
    """Nodes times hours that a job may ask for."""
    time_by_nodes: tuple[tuple[int, Time], ...] = ()
    """(number of nodes, longest time): the first row with enough nodes applies."""
    queues: dict[str, QueueLimits] = {}
    """Limits of a queue, by its name."""
    interactive: QueueLimits | None = None
    """Limits of ``llmctl interactive``, in addition to those of batch jobs."""
    without_group: QueueLimits | None = None
    """Limits of jobs without a group, if the site allows such jobs."""


class DefaultsProfile(_Part):
    """Defaults for values that a job does not set."""

    resource_type: Word | None = None
    """Kind of node, one of ``resource_types``."""
    queue: Word | None = None
    """Queue or partition. Unset: that of the kind of node, else the scheduler's own."""
    time: Time = None
    """Time limit passed to the scheduler. Unset: the site's own default."""
    priority: int | None = None
    """Priority, in the scheduler's numbers. Unset: none is passed."""


class LaunchProfile(_Part):
    """Start of the ranks: launcher and its options."""

    launcher: Literal["torchrun", "srun", "mpirun"] | None = None
    """Unset: the scheduler's first launcher (see its backend)."""
    srun_options: tuple[str, ...] = ()
    """Further options for srun."""
    mpirun: str = "mpirun"
    """The mpirun command."""
    mpirun_options: tuple[str, ...] = ()
    """Further options for mpirun."""
    mpirun_carries_environment: bool | None = None
    """True if mpirun passes the environment to the nodes. Unset: true under a scheduler, false over plain ssh."""
    bind_cpus: bool = False
    """True to have srun bind each rank to its own share of the cores; mpirun never binds."""


class ContainerProfile(_Part):
    """Container settings. The image is --container, or environment.path if environment.kind is container."""

    runtime: Literal["pyxis", "enroot", "apptainer", "singularity"] | None = None
    """Unset: the site has no container runtime known to llmctl."""
    mounts: tuple[str, ...] = ()
    """``SRC:DST[:FLAGS]`` for every container. The folder of the runs is always mounted."""
    workdir: str | None = None
    """Folder in the image in which the container, and a COMMAND without job.code, starts."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(:(auto|create|exec|no_exec))?$")
    """pyxis: keep the container's file system under this name; an existing one takes precedence over the image."""
    save: str | None = None
    """pyxis: file to save the container's final state to."""
    mount_home: bool | None = None
    """Mount the home directory. Unset: the runtime's own default."""
    remap_root: bool | None = None
    """Be root inside the container. Unset: the runtime's own default."""
    writable: bool | None = None
    """Let the job change files of the image, for its own time. Unset: the runtime's own default."""
    entrypoint: bool | None = None
    """pyxis: run the image's entrypoint. Unset: the site's own default."""
    env: tuple[str, ...] = ()
    """Host variables that override the image's, besides the variables that the job sets."""
    setup: tuple[str, ...] = ()
    """Shell lines run inside the container before the ranks; the image's own variables are visible."""
    image_folder: str | None = None
    """Shared folder for imported registry images (.sqsh or .sif). Unset: below runs_root; pyxis pulls on every node."""
    options: tuple[str, ...] = ()
    """Further options for the runtime."""


class CostProfile(_Part):
    """Cost of a job in the site's points. Sites without points need no values: node-hours are always shown."""

    unit: str = "points"
    """Name of the site's points."""
    reserved_factor: float = Field(default=1.0, gt=0)
    """Factor of the cost inside a reservation."""
    priority_factors: dict[int, float] = {}
    """Priority -> factor."""


class ClusterProfile(_Part):
    """One site's offer, checked on construction."""

    name: str
    """Name of the profile's file; not a key in any file."""
    description: str = ""
    """The cluster in a few words, for ``clusters list``."""
    notice: str = ""
    """Site message, shown once to each user of the cluster."""
    scheduler: str
    """Scheduler of the cluster: slurm, sge, pbs, lsf, ssh, local, or that of an installed package."""
    login: LoginProfile = LoginProfile()
    hosts: tuple[SshName, ...] = ()
    """ssh: the machines, head node first, as the ssh command knows them."""
    shared: bool = True
    """ssh: true if runs_root is one folder shared by all hosts."""
    runs_root: str | None = Field(default=None, min_length=1)
    """Folder of the run directories, on the file system shared by the nodes. ``~`` is the home directory."""
    group: Word | None = None
    """Group, project or account to bill."""
    group_required: bool = False
    """True if the site refuses jobs without a group; llmctl checks before the queue does."""
    group_option: Literal["-P", "-A", "-G", "-W group_list"] | None = None
    """PBS and LSF (-P, -G): option that names the group at this site. Unset: -P. Other schedulers have one option."""
    work_area: str | None = None
    """The site's place for runs, offered by ``clusters setup``; ``{group}`` and ``{user}`` are filled in."""
    resource_types: dict[Word, ResourceType] = {}
    """Kinds of node, by the name that ``--resource-type`` takes."""
    limits: LimitsProfile = LimitsProfile()
    defaults: DefaultsProfile = DefaultsProfile()
    options: tuple[Line, ...] = ()
    """Further directives for every job, one line each, without the scheduler's prefix."""
    environment: EnvironmentProfile = EnvironmentProfile()
    rendezvous: RendezvousProfile = RendezvousProfile()
    launch: LaunchProfile = LaunchProfile()
    container: ContainerProfile = ContainerProfile()
    cost: CostProfile = CostProfile()
    env: Variables = {}
    """Variables of every job."""
    stop_grace_s: int = Field(default=120, gt=0)
    """Seconds that a run has to save after the signal to stop."""

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, scheduler: str) -> str:
        check_scheduler(scheduler)
        return scheduler


def check_scheduler(scheduler: str) -> None:
    """Refuse a scheduler that is neither built in nor provided by an installed package.

    Raises:
        ValueError: the scheduler is unknown; lists the valid names.
    """
    if scheduler in SCHEDULERS:
        return
    from llmctl.site.profile_names import installed_backends

    installed = installed_backends()
    if scheduler not in installed:
        raise ValueError(f"the schedulers are {', '.join((*SCHEDULERS, *sorted(installed)))}")


def load_profile(folders: UserFolders, name: str, origin: str = "--cluster") -> ClusterProfile:
    """Load the profile called ``name``, with the user's overlay.

    Args:
        folders: where the user's files are.
        name: name of the file, without .yaml.
        origin: source of the name, for messages: a flag, which begins with a dash, ARGUMENT, or a place.

    Raises:
        UsageError: a flag or argument names a cluster without a profile; names the nearest one.
        ProfileError: another origin does so, or a file is invalid: names the file, the key and the valid values.
    """
    files = profile_files(folders, name)
    if not files:
        from llmctl.site.profile_problem import unknown_cluster

        raise unknown_cluster(folders, name, origin)
    return profile_of(name, [(path, read_layer(path)) for path in files])


def profile_of(name: str, layers: Sequence[tuple[Path, Mapping[str, Any]]]) -> ClusterProfile:
    """Merge layers into a profile, in order. Each layer comes with its file.

    Raises:
        ProfileError: names the file, the key and what is valid.
    """
    values: dict[str, Any] = {}
    for _, layer in layers:
        values = overlay(values, layer)
    try:
        return ClusterProfile(**{**values, "name": name})
    except ValidationError as error:
        from llmctl.site.profile_problem import profile_problem

        raise profile_problem(error, layers, ClusterProfile) from None


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` merged over ``below``: mappings merge key by key, all other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_layer(path: Path) -> dict[str, Any]:
    """The unchecked mapping of a profile, overlay or user config file.

    Raises:
        ProfileError: the file cannot be read or is not a mapping; names the file.
    """
    from trainer.config.errors import ConfigError
    from trainer.config.yaml_file import read_yaml

    try:
        values = read_yaml(path)
    except ConfigError as error:
        raise ProfileError(f"{path}: {error.problem}") from None
    if "name" in values:
        raise ProfileError(f"{path}: name: the file name is the profile's name; remove the key")
    return values
