"""ClusterProfile: what one site offers: one clusters/NAME.yaml, and the user's overlay of the same name over it."""

import difflib
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
    field_validator,
    model_validator,
)
from typing_extensions import Self

from llmctl.errors import ProfileError, UsageError
from llmctl.paths import UserFolders, profile_files
from llmctl.site.job import VARIABLE, JobError, parse_time
from llmctl.site.profile_names import ARGUMENT, cluster_names, installed_backends

SCHEDULERS = ("slurm", "sge", "pbs", "lsf", "ssh", "local")
"""Names that ``scheduler:`` may have, besides those of installed packages; llmctl.backends has one row for each."""
_SSH_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]{0,254}$"


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_time(value)
        except JobError as error:
            raise ValueError(error.problem) from None
    return value


Time = Annotated[int | None, BeforeValidator(_seconds)]
"""Seconds; files write them as ``H:M:S``."""


def _variable_names(env: dict[str, str]) -> dict[str, str]:
    wrong = next((name for name in env if not VARIABLE.fullmatch(name)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} cannot be the name of a variable")
    return env


Variables = Annotated[dict[str, str], AfterValidator(_variable_names)]
"""Names and values of variables."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class EnvironmentProfile(_Part):
    """The Python environment that jobs run in."""

    modules: tuple[str, ...] = ()
    """Environment modules to load, in order."""
    kind: Literal["venv", "conda", "container"] | None = None
    path: str | None = None
    """Folder of the virtual or conda environment; for a container the image."""
    module_init: str | None = None
    """File that defines the ``module`` function where batch shells do not. Unset: the usual places are searched."""
    python: str | None = None
    """The interpreter. Unset: the environment's own; on this machine without an environment, llmctl's."""
    setup: tuple[str, ...] = ()
    """Shell lines, taken as they are, run after the modules are loaded and before the environment is activated."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind is None) != (self.path is None):
            raise ValueError("kind and path go together: set both or neither")
        return self


class PortRule(_Part):
    """A site's published rule for the port: ``base + job id % modulo``."""

    base: int = Field(gt=0, lt=65536)
    modulo: int = Field(gt=0, lt=65536)


class RendezvousProfile(_Part):
    """Where the ranks of a job meet."""

    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:-]{1,32}$")
    """Network interface whose IPv4 address the head node is reached at. Unset: the one towards the other nodes."""
    ports: tuple[int, int] = (20000, 29999)
    """First and last port to try. Below Linux's ephemeral ports, so that no client socket sits there."""
    port_rule: PortRule | None = None
    """Where trying begins. Unset: anywhere in ``ports``, by the job id."""

    @field_validator("ports")
    @classmethod
    def _check_range(cls, ports: tuple[int, int]) -> tuple[int, int]:
        if not 0 < ports[0] <= ports[1] < 65536:
            raise ValueError("give the first and the last port, from 1 to 65535, as in [20000, 29999]")
        return ports


class LoginProfile(_Part):
    """Where the cluster's commands are run. Without ``host``: on this machine, which then is a login node."""

    host: str | None = Field(default=None, pattern=_SSH_NAME)
    """As the ssh command knows it: a name, an alias of ~/.ssh/config or user@name."""
    proxy_jump: str | None = Field(default=None, pattern=_SSH_NAME)
    """Host to go through, where ~/.ssh/config does not say."""
    python: str | None = None
    """Python 3.7 or later of the login node. Unset: the first that is found there."""


class ResourceType(_Part):
    """One kind of node, in the site's word for it."""

    gpus: int = Field(default=0, ge=0)
    """GPUs of one node; of a fractional type, of the part."""
    cores: int | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    fraction: bool = False
    """A part of a node: one of it only, and other jobs beside it."""
    max_nodes: int | None = Field(default=None, gt=0)
    max_time: Time = None
    max_node_hours: float | None = Field(default=None, gt=0)
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    gpu: str | None = None
    """The GPU as people call it, such as H200: doctor compares it with what torch was built for."""
    gpu_type: str | None = None
    """The scheduler's word for the GPU, where it wants one (Slurm: ``--gpus-per-node=TYPE:N``)."""
    queue: str | None = None
    """Queue or partition that this kind of node is in."""
    points_per_hour: float | None = Field(default=None, ge=0)
    """What one node costs for an hour, in the site's units."""
    options: tuple[str, ...] = ()
    """Further directives for jobs on this kind of node, each one line without the scheduler's prefix."""
    env: Variables = {}
    """Variables of jobs on this kind of node, over the cluster's."""
    ssh: bool = True
    """PBS: whether users reach the nodes of their own jobs by ssh, which ``interactive --run`` goes by."""


class LimitsProfile(_Part):
    """What the site refuses. A reservation goes by rules of its own: these are not applied to it."""

    max_nodes: int | None = Field(default=None, gt=0)
    max_time: Time = None
    max_node_hours: float | None = Field(default=None, gt=0)
    time_by_nodes: tuple[tuple[int, Time], ...] = ()
    """(up to so many nodes, longest time): the first that is large enough counts."""
    queues: dict[str, "QueueLimits"] = {}
    interactive: "QueueLimits | None" = None
    """For ``llmctl interactive``, besides those of batch jobs."""
    without_group: "QueueLimits | None" = None
    """For whoever names no group, where the site lets that be tried."""


class QueueLimits(_Part):
    """Limits of one queue or partition, over the general ones; or of one way to ask."""

    max_nodes: int | None = Field(default=None, gt=0)
    max_time: Time = None
    max_node_hours: float | None = Field(default=None, gt=0)


class DefaultsProfile(_Part):
    """What a job gets that does not ask."""

    resource_type: str | None = None
    queue: str | None = None
    time: Time = None
    """Given to the scheduler. Unset: the site's own default."""
    priority: int | None = None


class LaunchProfile(_Part):
    """How ranks are started."""

    launcher: Literal["torchrun", "srun", "mpirun"] | None = None
    """Unset: the scheduler's first (see its backend)."""
    srun_options: tuple[str, ...] = ()
    """Further words for srun."""
    mpirun: str = "mpirun"
    mpirun_options: tuple[str, ...] = ()
    """Further words for mpirun."""
    mpirun_carries_environment: bool | None = None
    """Whether mpirun's way to the nodes carries the environment. Unset: yes below a scheduler, no over plain ssh."""
    bind_cpus: bool = False
    """Whether srun binds each rank to its own share of the cores; mpirun never binds."""


class ContainerProfile(_Part):
    """How images are run. Which image: --container, or environment.path where environment.kind is container."""

    runtime: Literal["pyxis", "enroot", "apptainer", "singularity"] | None = None
    """Unset: the site runs none that llmctl knows."""
    mounts: tuple[str, ...] = ()
    """``SRC:DST[:FLAGS]`` for every container. The run directory is always mounted."""
    workdir: str | None = None
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(:(auto|create|exec|no_exec))?$")
    """pyxis: keep the container's file system under this name; it then goes before the image."""
    save: str | None = None
    """pyxis: file that the end state is written to."""
    mount_home: bool | None = None
    remap_root: bool | None = None
    writable: bool | None = None
    entrypoint: bool | None = None
    env: tuple[str, ...] = ()
    """Variables of the host that win over the image's, besides those that the job sets."""
    setup: tuple[str, ...] = ()
    """Shell lines that run inside the container, before the ranks; they see the image's own variables."""
    image_folder: str | None = None
    """Shared folder where an image of a registry is imported once, as .sqsh or .sif. Unset: below runs_root."""
    options: tuple[str, ...] = ()
    """Further words for the runtime."""


class CostProfile(_Part):
    """What a job is charged. Zero effort for sites without points: node-hours are always told."""

    unit: str = "points"
    reserved_factor: float = Field(default=1.0, gt=0)
    priority_factors: dict[int, float] = {}
    """Priority -> factor."""


class ClusterProfile(_Part):
    """What one site offers, checked at birth."""

    name: str
    """Name of the file; stands in no file."""
    description: str = ""
    notice: str = ""
    """Told once to everyone who uses the cluster."""
    scheduler: str
    login: LoginProfile = LoginProfile()
    hosts: tuple[str, ...] = ()
    """ssh: the machines, the head first, as the ssh command knows them."""
    shared: bool = True
    """ssh: whether runs_root is one folder that all hosts see."""
    runs_root: str | None = Field(default=None, min_length=1)
    """Folder that holds the run directories, on the file system that the nodes share. ``~`` is the home directory."""
    group: str | None = None
    """What the site bills to."""
    group_required: bool = False
    group_option: Literal["-P", "-A", "-G", "-W group_list"] | None = None
    """PBS and LSF (-P, -G): how this site is told the group. Unset: -P. The other schedulers have one way each."""
    work_area: str | None = None
    """Where runs belong at this site, offered by ``clusters setup``; ``{group}`` and ``{user}`` are filled in."""
    resource_types: dict[str, ResourceType] = {}
    limits: LimitsProfile = LimitsProfile()
    defaults: DefaultsProfile = DefaultsProfile()
    options: tuple[str, ...] = ()
    """Further directives for every job, each one line without the scheduler's prefix."""
    environment: EnvironmentProfile = EnvironmentProfile()
    rendezvous: RendezvousProfile = RendezvousProfile()
    launch: LaunchProfile = LaunchProfile()
    container: ContainerProfile = ContainerProfile()
    cost: CostProfile = CostProfile()
    env: Variables = {}
    """Variables that every job gets."""
    stop_grace_s: int = Field(default=120, gt=0)
    """Seconds that a run gets to save once it has been told to stop."""

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, scheduler: str) -> str:
        check_scheduler(scheduler)
        return scheduler


def check_scheduler(scheduler: str) -> None:
    """Refuse a scheduler that is neither ours nor an installed package's.

    Raises:
        ValueError: lists those there are.
    """
    if scheduler in SCHEDULERS:
        return
    installed = installed_backends()
    if scheduler not in installed:
        raise ValueError(f"the schedulers are {', '.join((*SCHEDULERS, *sorted(installed)))}")


def load_profile(folders: UserFolders, name: str, origin: str = "--cluster") -> ClusterProfile:
    """The profile called ``name``, with the user's overlay.

    Args:
        folders: where the user's files are.
        name: as the file is called, without .yaml.
        origin: where the name came from, for the message: a flag, which begins with a dash, ARGUMENT, or a place.

    Raises:
        UsageError: a flag or argument names a cluster that has no profile; lists those that have one.
        ProfileError: the same from elsewhere, or a file holds what cannot be used: says file, key and what is valid.
    """
    files = profile_files(folders, name)
    if not files:
        problem = f"{origin}: no cluster is called {name!r}; there are {', '.join(cluster_names(folders))}"
        raise (UsageError if origin.startswith("-") or origin == ARGUMENT else ProfileError)(
            f"{problem}\nllmctl clusters new makes another"
        )
    return profile_of(name, [(path, read_layer(path)) for path in files])


def profile_of(name: str, layers: Sequence[tuple[Path, Mapping[str, Any]]]) -> ClusterProfile:
    """The profile that layers make, each with the file it stands in, laid over each other in order.

    Raises:
        ProfileError: names the file, the key and what is valid.
    """
    values: dict[str, Any] = {}
    owner: dict[str, Path] = {}
    for path, layer in layers:
        owner.update(dict.fromkeys(_dotted(layer), path))
        values = overlay(values, layer)
    try:
        return ClusterProfile(**{**values, "name": name})
    except ValidationError as error:
        raise _profile_error(error, owner, layers[-1][0]) from None


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``: mappings merge key by key, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def expand_home(path: str, folders: UserFolders) -> Path:
    """``path`` with a leading ``~`` replaced by the home directory."""
    return folders.home / path[2:] if path.startswith("~/") else folders.home if path == "~" else Path(path)


def read_layer(path: Path) -> dict[str, Any]:
    """The mapping in a profile's, overlay's or user's config file, unchecked.

    Raises:
        ProfileError: it cannot be read or is no mapping; names the file.
    """
    from trainer.config.errors import ConfigError
    from trainer.planning.build_config import read_yaml

    try:
        values = read_yaml(path)
    except ConfigError as error:
        raise ProfileError(f"{path}: {error.problem}") from None
    if "name" in values:
        raise ProfileError(f"{path}: name: a profile is called what its file is called; remove the key")
    return values


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def _known_keys() -> list[str]:
    keys = []
    for key, field in ClusterProfile.model_fields.items():
        keys.append(key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Part):
            keys += [f"{key}.{inner}" for inner in field.annotation.model_fields]
    return [key for key in keys if key != "name"]


def _profile_error(error: ValidationError, owner: Mapping[str, Path], fallback: Path) -> ProfileError:
    # A misspelt key comes first: it may be why another one is missing.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    file = next((owner[known] for known in (key, key.rpartition(".")[0]) if known in owner), fallback)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _known_keys(), n=1, cutoff=0.5)
        what = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_known_keys())}"
        return ProfileError(f"{file}: {key}: unknown key; {what}")
    if first["type"] == "missing":
        return ProfileError(f"{file}: {key}: is missing and has no default; set it")
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if cause else first["msg"][:1].lower() + first["msg"][1:]
    return ProfileError(f"{file}: {key}: {first['input']!r} is not valid: {message}")
