"""Values of a submission, in the order in which they come about. This file imports no functions of ours.

asked: SubmitArguments -> JobSpec and TrainConfig; decided: Job, with the JobRequest for the scheduler; rendered:
RenderedJob -> SubmitPlan.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

if TYPE_CHECKING:
    from llmctl.backends.base import Backend, HostCommand, JobRequest, QueueBackend
    from llmctl.paths import UserFolders
    from llmctl.runs.record import RunRecord
    from llmctl.site.job import JobSpec
    from llmctl.site.profile import ClusterProfile
    from llmctl.submit.user_code import UserCode
    from llmctl.supervisor.bad_nodes.entries import BadNode
    from llmctl.transport.file_writes import PathFacts
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class Flag:
    """One value given on the command line.

    Attributes:
        flag: as typed.
        key: dotted key that the flag sets.
        value: for the key.
        adds: True to append the value, a list, to the list of the config file.
    """

    flag: str
    key: str
    value: Any
    adds: bool = False


@dataclass(frozen=True)
class SubmitArguments:
    """The command line of a submission: what the user asked for.

    Attributes:
        config: CONFIG as typed, or its sections, from Python; None without CONFIG.
        example: train the bundled example.
        cluster: as typed; None without --cluster.
        job: key of the job section -> value of its flag, None for a flag that is not given; other keys do not count.
        flags: further flags that set a key of the job section.
        settings: ``key=value`` of every --set; or values by dotted key, from Python.
        env: ``NAME=VALUE`` of every --env.
        secrets: NAME of every --secret.
        after: RUN, to start after the run has completed; ``any:RUN``, to start after any end of the run.
        command: COMMAND; empty for the trainer.
        torchrun: start COMMAND, a Python program, in every rank.
        run_id: as typed; None for a new run id.
        installed: use the environment's trainer instead of a snapshot of llmctl's own.
        template: file of a template for job.sh; None: the scheduler's own.
        dry_run: query no scheduler, and another machine only for facts that the script needs.
        script_arguments: ``NAME=VALUE`` of every --arg, for a CONFIG that is a training script.
        hf: folder of a published model whose training goes on, in place of CONFIG.
        data: files of text for it.
        environment: path of a virtual environment in place of the profile's environment, from Python; None: the
            profile's.
    """

    config: str | Mapping[str, Any] | None
    cluster: str | None
    job: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    settings: tuple[str, ...] | Mapping[str, Any] = ()
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    after: str | None = None
    command: tuple[str, ...] = ()
    run_id: str | None = None
    installed: bool = False
    template: str | None = None
    dry_run: bool = False
    script_arguments: tuple[str, ...] = ()
    hf: str | None = None
    data: tuple[str, ...] = ()
    example: bool = False
    torchrun: bool = False
    environment: str | None = None


@dataclass(frozen=True)
class ConfigFile:
    """A config file or training script, read; its values are not checked yet.

    Attributes:
        path: absolute; of sections that no file has, a name in the folder of their relative paths.
        sections: nested values.
        warnings: for the user.
        source: words for sections that no file has; else empty.
    """

    path: Path
    sections: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    source: str = ""

    @property
    def shown(self) -> str:
        """Words for the file in messages."""
        return self.source or str(self.path)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with every value decided: the input of the checks and of the templates.

    Attributes:
        spec: the user's job.
        config: of a training run; None for a COMMAND.
        request: for the scheduler; its profile has all paths resolved.
        backend: of the scheduler.
        folders: the user's folders.
        is_remote: True if the cluster is reached over the network.
        is_interactive: True for a job of ``llmctl interactive``, for which sites may have separate limits.
        submission: 1 for the first of a run; every resume adds 1.
        python: the interpreter, absolute or found in the job's PATH; empty: unknown.
        working_dir: working directory of a COMMAND.
        secrets_file: file with the values of the secrets; None without secrets.
        unset_secrets: names of secrets that are not set in the user's environment.
        image: image of the job; None for a job without a container.
        own_mounts: folders that the job's container must mount; empty without a container.
        new_folders: folders to create first, because a container can mount only existing folders.
        visible_gpus: GPUs of this machine, if this machine is the cluster; else None.
        left_out: nodes of the user's list of bad nodes that the job leaves out; they are in the request.
    """

    spec: "JobSpec"
    config: "TrainConfig | None" = None
    request: "JobRequest"
    backend: "Backend"
    folders: "UserFolders"
    is_remote: bool
    is_interactive: bool = False
    submission: int = 1
    python: str = ""
    working_dir: Path = Path("/")
    secrets_file: Path | None = None
    unset_secrets: tuple[str, ...] = ()
    image: str | None = None
    own_mounts: tuple[str, ...] = ()
    new_folders: tuple[str, ...] = ()
    visible_gpus: tuple[str, ...] | None = None
    left_out: "tuple[BadNode, ...]" = ()

    @cached_property
    def profile(self) -> "ClusterProfile":
        """Profile of the cluster."""
        return self.request.profile

    @cached_property
    def run_dir(self) -> Path:
        """Directory of the run, absolute."""
        return Path(self.request.run_dir)

    @cached_property
    def run_id(self) -> str:
        """Id of the run."""
        return self.run_dir.name

    @cached_property
    def queue(self) -> "QueueBackend | None":
        """The backend, if the scheduler has a queue; else None."""
        return cast("QueueBackend", self.backend) if self.backend.capabilities.has_queue else None

    @cached_property
    def overlay(self) -> Path:
        """Path of the user's overlay of the cluster's profile."""
        return self.folders.clusters / f"{self.profile.name}.yaml"

    @cached_property
    def cost(self) -> "JobCost | None":
        """Size and largest charge; None without a queue."""
        return JobCost.of(self.request) if self.backend.capabilities.has_queue else None


class JobCostFacts(TypedDict):
    """Size of a request and its largest charge."""

    nodes: int
    """Number of nodes."""
    gpus_per_node: int
    """GPUs of each node; 0 for a job on CPUs."""
    resource_type: str | None
    """The site's name of the kind of node; null if the site has no kinds."""
    hours: float | None
    """Time limit, in hours; null for the site's default."""
    node_hours: float | None
    """Nodes x hours."""
    points: float | None
    """Charge for the whole time, in the site's unit; null if the rate or the time is unknown."""
    unit: str | None
    """Unit of the points."""


class BadNodeFacts(TypedDict):
    """An entry of the list of bad nodes."""

    node: str
    """Name of the node."""
    cause: str
    """Sentence."""
    kind: str
    """preflight, gpu_hardware, silent (no heartbeat in two attempts of a run), unclear (fails far too often), or start
    (could not start the program that other nodes started)."""
    run: str
    """Run id of the newest failure."""
    attempt: int
    """Number of its attempt."""
    time: float
    """Time of that failure, in seconds since 1970."""
    failures: int
    """Number of failures since the node was listed."""


@dataclass(frozen=True)
class JobCost:
    """Size of a request and its largest charge.

    Attributes:
        nodes: number of nodes.
        gpus_per_node: GPUs of each node; 0 for a job on CPUs.
        resource_type: the site's name of the kind of node; None if the site has no kinds.
        hours: time limit; None: the site's own default.
        rate: points of a node for an hour; None if unknown.
        unit: of the points.
    """

    nodes: int
    gpus_per_node: int
    resource_type: str | None
    hours: float | None
    rate: float | None
    unit: str

    @classmethod
    def of(cls, request: "JobRequest") -> "JobCost":
        """The cost of a request, by the rates of its profile."""
        cost, resource = request.profile.cost, request.resource
        hours = request.time_s / 3600 if request.time_s is not None else None
        rate = None
        if resource is not None and resource.points_per_hour is not None:
            rate = resource.points_per_hour
            rate *= cost.reserved_factor if request.reservation is not None else 1.0
            rate *= cost.priority_factors.get(request.priority, 1.0) if request.priority is not None else 1.0
        return cls(
            request.nodes + request.spare_nodes, request.gpus_per_node, request.resource_type, hours, rate, cost.unit
        )

    @property
    def points(self) -> float | None:
        """Charge for the whole time; None if the rate or the time is unknown."""
        return None if self.rate is None or self.hours is None else self.rate * self.nodes * self.hours

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

    def as_json(self) -> JobCostFacts:
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


@dataclass(frozen=True)
class Problem:
    """One reason why a job cannot be submitted.

    Attributes:
        key: dotted key to blame: of the config, or of the profile; for a flag, the flag as typed.
        text: what is wrong, what is valid, what to do.
        also: further config keys of the problem; a flag that set one of them is blamed too.
        of: owner of the key. A run's own problem has no key.
        between_keys: True if several config keys contradict each other, so that any flag may be the cause.
    """

    key: str
    text: str
    also: tuple[str, ...] = ()
    of: Literal["config", "profile", "flag", "run"] = "config"
    between_keys: bool = False


@dataclass(frozen=True)
class PathCheck:
    """Paths to inspect, and the function that judges their facts."""

    paths: tuple[str, ...]
    judge: "Callable[[Mapping[str, PathFacts]], Problem | None]"


@dataclass(frozen=True)
class RenderedJob:
    """Script, settings and submit commands of a job.

    Attributes:
        script: text of job.sh.
        path: path of job.sh.
        commands: submit commands.
        settings: text of job.json, beside job.sh.
    """

    script: str
    path: Path
    commands: "tuple[HostCommand, ...]"
    settings: str

    def __str__(self) -> str:
        """The script, followed by the submit commands as comments."""
        lines = [f"# submitted on {command.host}: {shlex.join(command.argv)}\n" for command in self.commands]
        return self.script + "".join(lines)

    def as_bytes(self) -> bytes:
        """The text as bytes of job.sh, independent of the terminal's encoding; a COMMAND's bytes stay unchanged."""
        return str(self).encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class SubmitPlan:
    """A submission that has passed every check: files to write and commands to run.

    Attributes:
        record: the run's record after the submission, without the jobs.
        job: with every value decided.
        rendered: script and commands.
        user_code: the user's project; None without ``job.code``.
        installed: use the environment's trainer.
        is_new: True if the run directory must be created.
        warnings: for the user, on standard error.
        files: name -> content of further files for the run directory.
    """

    record: "RunRecord"
    job: Job
    rendered: RenderedJob
    user_code: "UserCode | None"
    installed: bool
    is_new: bool
    warnings: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


def bad_node_facts(bad: "BadNode") -> BadNodeFacts:
    """Plain values of an entry."""
    return BadNodeFacts(
        node=bad.node,
        cause=bad.cause,
        kind=bad.kind,
        run=bad.run,
        attempt=bad.attempt,
        time=bad.time,
        failures=bad.failures,
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
