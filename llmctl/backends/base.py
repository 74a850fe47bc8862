"""Interface of all schedulers. Pure: builds argv and parses text, without I/O; a transport runs the commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from llmctl.errors import SchedulerError
from llmctl.job_state import JobState

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan
    from llmctl.site.profile import ClusterProfile, ResourceType


@dataclass(frozen=True)
class HostCommand:
    """One command and its host.

    Attributes:
        host: name of the host; LOGIN stands for the machine of the scheduler's commands: login node or this machine.
        argv: the command.
    """

    host: str
    argv: tuple[str, ...]


LOGIN = "login"
"""Host of a scheduler's commands."""


@dataclass(frozen=True)
class SubmittedJob:
    """Job of one submission on one host.

    Attributes:
        host: the host whose scheduler (or process table) knows the job.
        job_id: the scheduler's id, or the process id where there is no scheduler.
        pid: process id of job.sh where there is no scheduler, else None.
        pid_start_time: clock ticks from the host's start to the process's; identifies the process with ``boot_id``.
        boot_id: the kernel's id of the host's start in which ``pid`` is valid.
    """

    host: str
    job_id: str
    pid: int | None = None
    pid_start_time: int | None = None
    boot_id: str | None = None


@dataclass(frozen=True)
class JobRequest:
    """Request to a scheduler: a JobSpec with every open question answered by the profile.

    All words are plain (see llmctl.site.job.WORD), so a directive needs no quotes. Paths may hold any character, and
    appear on command lines only.

    Attributes:
        profile: of the cluster.
        job_name: the run id in a form that the scheduler accepts.
        run_dir: the run directory, absolute; the working directory of every command, with ``job.log`` and ``job.sh``.
        nodes: number of nodes that the job trains on.
        ranks_per_node: G, the number of ranks on each node.
        gpus_per_node: GPUs requested per node; 0 for a job on CPUs.
        tasks_per_node: tasks of each node for schedulers that count tasks: one for torchrun, otherwise one per rank.
        cores_per_node: CPU cores of all tasks of a node together, the same number for each task; None if unset in the
            profile. Steps inside the job may request no more.
        time_s: limit in seconds; None: the site's default.
        launcher: torchrun, srun or mpirun.
        resource_type: the site's name for the kind of node; None if the site has no such names.
        resource: the profile's entry for the kind of node; None without an entry.
        site_options: directives of the site, then those of the kind of node. As the last options they override all
            others.
        group: account, project or group to bill.
        queue: queue or partition.
        reservation: id of nodes reserved earlier.
        priority: priority in the scheduler's own numbers.
        exclude: names of nodes to leave out.
        hosts: machines of the job, the head first, where llmctl chooses them; else empty.
        container: container of the job; None: no container.
        after: ids of the jobs that must end first.
        after_any: True: start after any end of those jobs. False: only after success, if the scheduler can tell.
        gpu_ids: ids of the GPUs of each node, if this machine is the cluster and has GPUs; else empty.
        spare_nodes: further nodes of the job, for later attempts.
    """

    profile: "ClusterProfile"
    job_name: str
    run_dir: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    cores_per_node: int | None = None
    time_s: int | None = None
    launcher: str = "torchrun"
    resource_type: str | None = None
    resource: "ResourceType | None" = None
    site_options: tuple[str, ...] = ()
    group: str | None = None
    queue: str | None = None
    reservation: str | None = None
    priority: int | None = None
    exclude: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    container: "ContainerPlan | None" = None
    after: tuple[str, ...] = ()
    after_any: bool = True
    gpu_ids: tuple[tuple[str, ...], ...] = ()
    spare_nodes: int = 0


@dataclass(frozen=True)
class JobReport:
    """State of one job, from a scheduler's queue or its accounting.

    Attributes:
        job_id: as returned by ``parse_job_id``: plain, without cluster or array parts.
        state: the neutral state; unknown for a word that this llmctl does not know.
        raw: the scheduler's own word.
        name: the job's name, by which a reused id is recognised; None if not in the output.
        reason: why the job is pending or held, in words for people; empty without a reason.
        expected_start: expected start, as the scheduler writes it; None if unknown.
        hosts: names of the job's nodes.
        exit_code: of job.sh, 128 + N for signal N; None if unknown.
        restarts: number of times that the scheduler has requeued the job; None if unknown.
    """

    job_id: str
    state: JobState
    raw: str
    name: str | None = None
    reason: str = ""
    expected_start: str | None = None
    hosts: tuple[str, ...] = ()
    exit_code: int | None = None
    restarts: int | None = None


NodeState = Literal["idle", "mixed", "allocated", "draining", "drained", "down", "unknown"]
"""In the order of display: available first, broken last."""


@dataclass(frozen=True)
class NodeReport:
    """State of one node, as the scheduler reports it. None: not reported.

    Attributes:
        name: of the node.
        state: neutral state; unknown: the scheduler's word has no neutral one.
        raw: the scheduler's own word.
        reason: why the node is drained or down, untruncated.
        gpus: GPUs of the node.
        gpus_used: GPUs allocated to jobs.
        cores: CPU cores of the node.
        cores_used: CPU cores allocated to jobs.
        memory_gib: memory of the node in GiB.
        queues: the node's queues or partitions.
    """

    name: str
    state: NodeState
    raw: str
    reason: str = ""
    gpus: int | None = None
    gpus_used: int | None = None
    cores: int | None = None
    cores_used: int | None = None
    memory_gib: float | None = None
    queues: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """Facts about a scheduler, by which llmctl decides instead of by the scheduler's name.

    Attributes:
        has_queue: jobs wait in a queue and run on nodes that the scheduler chooses; the backend is a QueueBackend.
        starts_on_hosts: jobs are started at once, on the machines that the profile lists as ``hosts``.
        mpirun_carries_environment: mpirun reaches the nodes by the scheduler, which passes the environment on.
    """

    has_queue: bool
    starts_on_hosts: bool = False
    mpirun_carries_environment: bool = True

    @cached_property
    def starts_in_place(self) -> bool:
        """True if jobs start at once, on the machine where the cluster's commands run."""
        return not self.has_queue and not self.starts_on_hosts


@dataclass(frozen=True)
class ProfileHints:
    """Texts for a new profile, see llmctl.operate.new_profile. None or empty: the profile omits this part.

    Attributes:
        node_types: where the user finds the site's kinds of nodes; one sentence.
        example_type: one kind of node with the keys that this scheduler uses, as YAML in one line.
        launchers: the default launcher, and the others as a comment.
        group: where the group appears in a submission; one sentence.
    """

    node_types: str | None = None
    example_type: str = ""
    launchers: str = ""
    group: str | None = None


@dataclass(frozen=True)
class DoctorCommands:
    """Shell lines by which ``llmctl doctor`` examines a scheduler on its login node.

    Attributes:
        programs: the scheduler's programs that llmctl calls.
        version: prints the version without asking a server.
        queues: asks the server for its queues; prints one per line, the name first.
        accounts: prints the groups that the user may bill to; None: the scheduler has no such command.
        accounts_are_complete: True: a group missing from ``accounts`` is refused. False: Unix groups count too.
        oldest_version: the oldest release that llmctl is tested with, as ``22.05``; None: any.
    """

    programs: tuple[str, ...]
    version: str
    queues: str
    accounts: str | None = None
    accounts_are_complete: bool = False
    oldest_version: str | None = None


def parse_process_id(output: str) -> str:
    """Job id of a backend without a queue: the process id of the started job.sh.

    Raises:
        SchedulerError: ``output`` is not a process id.
    """
    if not output.strip().isdecimal():
        raise SchedulerError(f"starting the job printed no process id but {output!r}", transient=False)
    return output.strip()


class Backend(Protocol):
    """Interface of every backend, with or without a queue.

    Attributes:
        name: the scheduler, as named in profiles.
        template: file name of the job script's template; the whole path if the backend's package brings the template.
        job_keys: supported keys of the config's ``job`` section; other keys are refused, not ignored.
        launchers: supported launchers, the default first.
        capabilities: facts by which llmctl decides.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (described above)
    @property
    def template(self) -> str: ...  # noqa: D102
    @property
    def job_keys(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def launchers(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def capabilities(self) -> Capabilities: ...  # noqa: D102

    def profile_hints(self) -> ProfileHints:
        """Texts for ``llmctl clusters new``."""

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """Submit commands, run in the run directory: one for a batch scheduler, one per host without a scheduler."""

    def parse_job_id(self, output: str) -> str:
        """Job id in the output of a submit command.

        Raises:
            SchedulerError: ``output`` has no job id; the message quotes it.
        """

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """Command that runs an interactive script on a node of a new allocation.

        The command reports if no node is free, instead of a silent wait.

        Args:
            request: the requested allocation.
            script: text from render.interactive_script; runs ``command``, or a shell if ``command`` is empty.
            command: argv to run in the job's environment.
        """


class QueueBackend(Backend, Protocol):
    """Further interface of a backend with a queue. Every argv is run on the login node, without a terminal.

    Attributes:
        tells_ends_apart: True if a job can wait for another job's success; otherwise the job starts after any end.
    """

    @property
    def tells_ends_apart(self) -> bool: ...  # noqa: D102 (described above)

    def doctor_commands(self) -> DoctorCommands:
        """Shell lines for ``llmctl doctor``."""

    def priority_problem(self, priority: int) -> str:
        """Reason to refuse this priority; empty if users may set it."""

    def options_problem(self, options: Sequence[str]) -> str:
        """Reason to refuse these directives in a profile; empty if they are allowed."""

    def job_name(self, run_id: str) -> str:
        """Job name for a run id, in a form that this scheduler accepts. A lost job is found by its name."""

    def directives(self, request: JobRequest) -> list[str]:
        """Options for the head of the script, without the scheduler's prefix. All plain words."""

    def next_job_argv(self, request: JobRequest) -> tuple[str, ...]:
        """Command by which a job submits the run's next job, in the run directory, on its head node."""

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """Command that asks the queue about all these jobs in one call."""

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """Reports in the output of ``status_argv`` or ``find_argv``, by job id.

        Other jobs than the requested ones may be included. Malformed lines are skipped: llmctl concludes nothing from a
        job's absence alone.
        """

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """True if the queue has answered: an unknown job is an answer, an unreachable server is not."""

    def find_argv(self, job_name: str) -> list[str]:
        """Command that lists the user's jobs of this name (or all), to find a submission whose answer was lost."""

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str] | None:
        """Command that asks the accounting about ended jobs in one call; None without accounting."""

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """Reports in the output of ``accounting_argv``, by job id; the newest if an id was reused."""

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """Commands that end jobs; job.sh gets a signal first and can save."""

    def nodes_argv(self) -> list[list[str]]:
        """Commands that list the nodes."""

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """Nodes in the outputs of the commands of ``nodes_argv``, in order."""

    def attach_argv(
        self,
        job_id: str,
        host: str,
        script: str,
        command: Sequence[str],
        container: "ContainerPlan | None" = None,
        *,
        cores: int | None = None,
    ) -> list[str]:
        """Command like ``interactive_argv``, but on ``host`` of a running job, beside its ranks.

        ``container``: with pyxis, the container of the ranks, if it has a name by which pyxis finds it.
        ``cores``: the job's cores on the node; None if unset in the profile.
        """

    def is_transient(self, exit_status: int, stderr: str) -> bool:
        """True if a failed command may succeed a little later: the server is restarting or overloaded."""

    def was_not_taken(self, exit_status: int, stderr: str) -> bool:
        """True if a submission with a transient failure was surely not accepted, so that a retry is safe.

        A server may carry out a request long after its client has stopped waiting.
        """

    def advice(self, stderr: str) -> str:
        """One sentence of advice for common refusals; empty without advice."""
