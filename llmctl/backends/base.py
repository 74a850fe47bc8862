"""What every scheduler is asked. Answers are pure: argv to run, text to parse. No I/O; a transport has the hands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from llmctl.job_state import JobState

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan
    from llmctl.site.profile import ClusterProfile, ResourceType


@dataclass(frozen=True)
class HostCommand:
    """One command and the host that it is run on.

    Attributes:
        host: where; LOGIN is wherever the cluster's own commands are run: the login node, or this machine.
        argv: what.
    """

    host: str
    argv: tuple[str, ...]


LOGIN = "login"
"""Host of a command that asks a scheduler."""


@dataclass(frozen=True)
class SubmittedJob:
    """What a submission left behind on one host.

    Attributes:
        host: the host whose scheduler (or process table) knows the job.
        job_id: the scheduler's id, or the process id where there is no scheduler.
        pid: process id of job.sh where there is no scheduler, else None.
        pid_start_time: clock ticks from the host's start to the process's; names it together with ``boot_id``.
        boot_id: the host's start that ``pid`` belongs to.
    """

    host: str
    job_id: str
    pid: int | None = None
    pid_start_time: int | None = None
    boot_id: str | None = None


@dataclass(frozen=True)
class JobRequest:
    """What a scheduler is asked for: a JobSpec for which the profile has answered every question.

    All words are plain (see llmctl.site.job.WORD): they can stand in a directive as they are. Paths may hold anything,
    and go on a command line only.

    Attributes:
        profile: of the cluster.
        job_name: the run id, as the scheduler can take it.
        run_dir: the run directory, absolute; every command is run in it, so that ``job.log`` and ``job.sh`` name files.
        nodes: number of nodes.
        ranks_per_node: G, the ranks that each node gets.
        gpus_per_node: GPUs that each node is asked for; 0 for a job on CPUs.
        cores_per_node: CPU cores of the kind of node; None if the profile does not say.
        time_s: limit in seconds; None leaves it to the site.
        launcher: what starts the ranks: torchrun, srun or mpirun.
        resource_type: the site's word for the kind of node; None where the site has none.
        group: what the site bills to.
        queue: queue or partition.
        reservation: id of nodes reserved earlier.
        priority: the scheduler's number.
        container: what the job runs in; None: on the nodes themselves.
        after: ids of the jobs that must have ended before.
        after_any: start however those jobs end; otherwise only if they end well, where the scheduler can tell.
    """

    profile: "ClusterProfile"
    job_name: str
    run_dir: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cores_per_node: int | None = None
    time_s: int | None = None
    launcher: str = "torchrun"
    resource_type: str | None = None
    group: str | None = None
    queue: str | None = None
    reservation: str | None = None
    priority: int | None = None
    container: "ContainerPlan | None" = None
    after: tuple[str, ...] = ()
    after_any: bool = True

    @cached_property
    def resource(self) -> "ResourceType | None":
        """What the profile says of the kind of node."""
        return self.profile.resource_types.get(self.resource_type or "")

    @property
    def tasks_per_node(self) -> int:
        """Tasks that a scheduler which counts in tasks is asked for: one agent, or a task per rank."""
        return 1 if self.launcher == "torchrun" else self.ranks_per_node

    @property
    def cores_per_task(self) -> int | None:
        """Cores of each of these tasks; None if the profile does not say."""
        return None if self.cores_per_node is None else max(1, self.cores_per_node // self.tasks_per_node)

    @property
    def cores_granted(self) -> int | None:
        """Cores that the tasks of a node have together: no more may be asked for inside the job."""
        return None if self.cores_per_task is None else self.cores_per_task * self.tasks_per_node


@dataclass(frozen=True)
class JobReport:
    """What a scheduler's queue, or its accounting, says of one job.

    Attributes:
        job_id: as ``parse_job_id`` gave it: plain, without cluster or array parts.
        state: the neutral word; unknown for a word that this llmctl does not know.
        raw: the scheduler's own word.
        name: the job's name, to know a reused id by; None if the output does not say.
        reason: why it is pending or held, in words for people; empty if there is nothing to say.
        expected_start: when it is expected to start, as the scheduler writes it; None if it does not know.
        hosts: names of its nodes.
        exit_code: of job.sh, 128 + N for signal N; None if not known.
        restarts: how often the scheduler has started it again; None if not known.
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


@dataclass(frozen=True)
class NodeReport:
    """What a scheduler says of one node. None: it does not say.

    Attributes:
        name: of the node.
        state: idle, mixed, allocated, drained, draining, down or unknown.
        raw: the scheduler's own word.
        reason: why it is drained or down, whole.
        gpus: GPUs of the node.
        gpus_used: of these, given to jobs.
        cores: CPU cores of the node.
        cores_used: of these, given to jobs.
        memory_gib: GiB of the node.
        queues: the queues or partitions that it serves.
    """

    name: str
    state: str
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
    """Facts about a scheduler that llmctl decides by, instead of by the scheduler's name.

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
        """True if jobs are started at once, on the one machine where the cluster's commands run."""
        return not self.has_queue and not self.starts_on_hosts


@dataclass(frozen=True)
class ProfileHints:
    """Texts for a new profile, see llmctl.operate.new_profile. None or empty: the profile needs no such part.

    Attributes:
        node_types: where the user finds the site's kinds of nodes; one sentence.
        example_type: one kind of node with the keys that matter here, as YAML in one line.
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
        queues: asks the server for its queues, which it prints on a line each, the name first.
        accounts: prints the groups that the user may bill to; None: the scheduler cannot tell.
        accounts_are_complete: a group that ``accounts`` does not print is refused; otherwise Unix groups count too.
        oldest_version: the oldest release that llmctl is tried with, as ``22.05``; None: any.
    """

    programs: tuple[str, ...]
    version: str
    queues: str
    accounts: str | None = None
    accounts_are_complete: bool = False
    oldest_version: str | None = None


class Backend(Protocol):
    """What every backend answers, with or without a queue.

    Attributes:
        name: the scheduler, as profiles name it.
        template: file name of the job script's template.
        job_keys: keys of the config's ``job`` section that mean something here; others are refused, not ignored.
        launchers: what can start the ranks here, the default first.
        capabilities: facts that llmctl decides by.
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
        """One command for a batch scheduler, one per host where jobs are started directly. Run in the run directory."""

    def parse_job_id(self, output: str) -> str:
        """The job id that a submit command printed.

        Raises:
            SchedulerError: there is none in ``output``; quotes it.
        """

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """Runs the text of an interactive script (see render.interactive_script) on a node of a new allocation.

        Says so and ends, instead of waiting silently, where nothing is free.

        Args:
            request: what is asked for.
            script: the text. Runs ``command``, or a shell if that is empty.
            command: argv of what to run in the job's environment.
        """


class QueueBackend(Backend, Protocol):
    """What a backend with a queue answers on top. Every argv is run on the login node, without a terminal.

    Attributes:
        tells_ends_apart: whether a job can wait for another's good end; otherwise any end lets it start.
    """

    @property
    def tells_ends_apart(self) -> bool: ...  # noqa: D102 (described above)

    def doctor_commands(self) -> DoctorCommands:
        """Shell lines for ``llmctl doctor``."""

    def priority_problem(self, priority: int) -> str:
        """The reason that users may not have this priority; empty if they may."""

    def options_problem(self, options: Sequence[str]) -> str:
        """The reason that a profile may not have these directives; empty if it may."""

    def job_name(self, run_id: str) -> str:
        """The run id as this scheduler takes it for a job's name: a lost job is found again by it."""

    def directives(self, request: JobRequest) -> list[str]:
        """Options that stand in the head of the script, without the scheduler's prefix. All plain words."""

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """Asks the queue about jobs, all in one call."""

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """The reports in what ``status_argv`` or ``find_argv`` printed, by job id; others than asked for may be there.

        Lines that cannot be understood are passed over: nothing is ever concluded from a job's absence alone.
        """

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """Whether the queue has answered at all: a job that it does not know is an answer, a lost server is none."""

    def find_argv(self, job_name: str) -> list[str]:
        """Lists the user's jobs of this name (or all): a submit whose answer was lost is found again."""

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str] | None:
        """Asks the accounting about jobs that have left the queue, all in one call. None: the scheduler has none."""

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """The reports in what ``accounting_argv`` printed, by job id; the newest where an id was used again."""

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """Ends jobs; job.sh gets a signal first and can save."""

    def nodes_argv(self) -> list[list[str]]:
        """Asks about the nodes."""

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """The nodes in what the commands of ``nodes_argv`` printed, in order."""

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
        """Like ``interactive_argv``, but on ``host`` of a job that runs already, beside its ranks.

        ``container``: with pyxis, the one that the ranks run in, if it has a name to be found by.
        ``cores``: that the job has on the node, where the profile says.
        """

    def is_transient(self, exit_status: int, stderr: str) -> bool:
        """Whether a failed command may succeed a little later: a server that is restarting or overloaded."""

    def was_not_taken(self, exit_status: int, stderr: str) -> bool:
        """Whether a submission that failed for the moment has surely not been taken, so that it can be sent again.

        A request that was sent may be read and carried out long after its client has given up waiting.
        """

    def advice(self, stderr: str) -> str:
        """One sentence on what to change, for the refusals that users meet; empty if there is nothing to add."""
