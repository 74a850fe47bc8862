"""Slurm, 22.05 and later. Only the text that every version prints: JSON came late and its keys drift.

Sources: sbatch(1), squeue(1), sacct(1), salloc(1), srun(1), scancel(1), https://slurm.schedmd.com/.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llmctl.backends.base import (
    LOGIN,
    Capabilities,
    DoctorCommands,
    HostCommand,
    JobReport,
    JobRequest,
    NodeReport,
    ProfileHints,
)
from llmctl.backends.slurm import nodes, words
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.site.container import ContainerPlan

_CARRIED = (
    "HOME,USER,LOGNAME,SHELL,PATH,LANG,LC_ALL,MODULEPATH,MODULESHOME,LMOD_CMD,LMOD_DIR,LMOD_PKG,LMOD_SYSTEM_NAME,"
    "LMOD_SYSTEM_DEFAULT_MODULES,SLURM_CONF,XDG_STATE_HOME"
)
"""Variables of the login node that a job is given, by name: all others could be secrets, and accounting keeps them."""

_FIELDS = "%i|%T|%S|%N|%r|%j"
"""Of squeue: id, state, start, hosts, reason, and last the name, which alone may hold anything."""

_ACCOUNTED = "JobID,Submit,State,ExitCode,NodeList,JobName"

_FORGET = (
    "unset $(env | LC_ALL=C sed -nE '/^SLURM_(CONF|JWT)/d; "
    r"s/^(S(BATCH|ALLOC|RUN|QUEUE|ACCT|CANCEL|CONTROL|INFO|LURM)_[A-Za-z0-9_]+)=.*/\1/p')"
)
"""Variables of the user's, or of a job that llmctl is called in, which would go before what a command is told or change
what it prints ("INPUT ENVIRONMENT VARIABLES" of sbatch(1): "will override any options set in a batch script"); SLURM_*
would even be handed on, whatever --export says. Kept is what leads to the controller."""

_OTHER_CLUSTER = re.compile(r"\s*(-M|--clusters?\b(?!-))")

_PATIENCE_S = 60
"""Seconds that an interactive allocation is waited for."""

_SIGNAL_LIMIT_S = 65535  # sbatch(1): "--signal": "sig_time must have an integer value between 0 and 65535"

_FINISHED_FIRST = (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN)
"""Of several parts of a job (array, heterogeneous job) what still goes on says what the job is."""


@dataclass(frozen=True)
class SlurmBackend:
    """Answers for Slurm."""

    name: str = "slurm"
    template: str = "slurm.sh.j2"
    job_keys: frozenset[str] = frozenset(
        {
            *("name", "nodes", "gpus_per_node", "time", "group", "resource_type", "queue", "reservation", "priority"),
            *("after", "container", "mounts", "launcher", "env", "secrets", "code"),
        }
    )
    launchers: tuple[str, ...] = ("torchrun", "srun", "mpirun")
    capabilities: Capabilities = Capabilities(has_queue=True)
    tells_ends_apart: bool = True

    def profile_hints(self) -> ProfileHints:
        """See llmctl.backends.slurm.setup."""
        from llmctl.backends.slurm.setup import PROFILE_HINTS

        return PROFILE_HINTS

    def doctor_commands(self) -> DoctorCommands:
        """See llmctl.backends.slurm.setup."""
        from llmctl.backends.slurm.setup import DOCTOR_COMMANDS

        return DOCTOR_COMMANDS

    def priority_problem(self, priority: int) -> str:
        """Refuse what becomes a negative --nice (sbatch(1): "Only privileged users can specify a negative")."""
        if priority <= 0:
            return ""
        return (
            f"{priority} is above 0, and on Slurm users can only step back: give 0 or below; what goes first at a site "
            "is a quality of service, such as --qos=NAME in the profile's options"
        )

    def options_problem(self, options: Sequence[str]) -> str:
        """Refuse options that send jobs to another cluster, whose queue nobody asks about them."""
        wrong = next((option for option in options if _OTHER_CLUSTER.match(option)), None)
        if wrong is None:
            return ""
        return (
            f"{wrong!r} sends jobs to another cluster of Slurm's, where llmctl could neither find nor cancel them; "
            "make a profile for that cluster (llmctl clusters new), with a login.host of it, or call llmctl with "
            "SLURM_CONF naming its slurm.conf"
        )

    def job_name(self, run_id: str) -> str:
        """The run id itself: Slurm takes any name."""
        return run_id

    def directives(self, request: JobRequest) -> list[str]:
        """The head of job.sh. ``priority`` becomes --nice, the one number that users may set: higher goes first."""
        options = [f"--job-name={request.job_name}", *_allocation(request), "--output=job.log", "--open-mode=append"]
        if request.priority is not None:
            options.append(f"--nice={-request.priority}")
        # The node that fails or the job that takes our nodes brings us back to the queue, and a new attempt goes on.
        options += ["--requeue", f"--signal=B:USR1@{_warning_s(request)}"]
        if request.after:
            kind = "afterany" if request.after_any else "afterok"
            options += [f"--dependency={kind}:{':'.join(request.after)}", "--kill-on-invalid-dep=yes"]
        return options + _own_options(request)

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """Sbatch in the run directory; what the script sees of our environment is named, see _CARRIED."""
        del request
        return [HostCommand(LOGIN, tuple(_plain("sbatch", "--parsable", f"--export={_CARRIED}", "job.sh")))]

    def parse_job_id(self, output: str) -> str:
        """The id in ``id``, ``id;cluster`` or ``Submitted batch job id``, whatever a site's plugins print around it."""
        for line in reversed(output.splitlines()):
            match = re.fullmatch(r"(\d+)(?:;\S+)?|Submitted batch job (\d+)(?: on cluster \S+)?", line.strip())
            if match:
                return match[1] or match[2]
        raise SchedulerError(f"sbatch gave no job id but {output.strip()[-500:]!r}", transient=False)

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """Salloc, and in it one step on the first node, which leaves room beside it for steps of the user's own."""
        options = [f"--job-name={request.job_name}", *_allocation(request), *_own_options(request)]
        step = ["--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--cpu-bind=none"]
        step += _cores(request.cores_granted)
        told = f"llmctl: asking for {_amount(request)}; giving up after {_PATIENCE_S} s if nothing is free"
        argv = ["salloc", f"--immediate={_PATIENCE_S}", *options, "srun", *step]
        return _on_terminal(argv, request.container, script, command, told)

    def attach_argv(
        self,
        job_id: str,
        host: str,
        script: str,
        command: Sequence[str],
        container: ContainerPlan | None = None,
        *,
        cores: int | None = None,
    ) -> list[str]:
        """A step beside the ranks. Since 20.11 steps share nothing unless they say --overlap."""
        step = [f"--jobid={job_id}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", *_cores(cores)]
        argv = ["srun", *step, "--mpi=none", "--cpu-bind=none"]
        return _on_terminal(argv, _attached(container), script, command)

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """All of the user's jobs: named ones would make the whole call fail as soon as one of them is forgotten.

        Those that have ended are there for some minutes (MinJobAge), which helps where there is no accounting.
        """
        del job_ids
        return _plain("squeue", "--noheader", "--me", "--all", "--states=all", f"--format={_FIELDS}")

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """One report per job, whatever the number of its parts."""
        return _by_job(_parse_queue_line(line) for line in output.splitlines())

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """A job that is not known any more is an answer; anything else that fails is none."""
        return exit_status == 0 or "Invalid job id specified" in stderr

    def find_argv(self, job_name: str) -> list[str]:
        """The user's jobs of one name, those that have just ended too."""
        return [*self.status_argv(()), f"--name={job_name}"]

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str] | None:
        """--duplicates: without it sacct shows one record of a job that was requeued, or whose id was used again."""
        wanted = ["--jobs", ",".join(job_ids), f"--format={_ACCOUNTED}"]
        return _plain("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", *wanted)

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """The newest record of each job, by the time of its submission; a requeue counts as one."""
        records: dict[str, list[tuple[str, JobReport]]] = {}
        for line in output.splitlines():
            fields = line.split("|", 5)
            if len(fields) == 6 and (job_id := _plain_id(fields[0])):
                records.setdefault(job_id, []).append((fields[1], _parse_record(job_id, *fields[2:])))
        return {job_id: _newest(found) for job_id, found in records.items()}

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """TERM for ranks and job.sh, and KILL after the site's KillWait. Silent about jobs that are gone."""
        return [HostCommand(LOGIN, tuple(_plain("scancel", *job_ids)))]

    def nodes_argv(self) -> list[list[str]]:
        """See slurm_nodes."""
        return [_plain("scontrol", "--details", "--oneliner", "--all", "show", "nodes")]

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """See slurm_nodes."""
        return [node for output in outputs for node in nodes.parse_nodes(output)]

    def is_transient(self, exit_status: int, stderr: str) -> bool:
        """A controller or database that does not answer may do so a little later."""
        return exit_status != 0 and words.is_transient(stderr)

    def was_not_taken(self, exit_status: int, stderr: str) -> bool:
        """Whether nothing was sent, or the controller itself has refused it."""
        return exit_status != 0 and words.was_not_taken(stderr)

    def advice(self, stderr: str) -> str:
        """What to change after a refusal of Slurm's or pyxis'."""
        return words.advice(stderr)


def _plain(*argv: str) -> list[str]:
    """A command of Slurm's in an environment that says nothing of its own (see command_result.program_of)."""
    return ["sh", "-c", f'{_FORGET}; exec "$0" "$@"', *argv]


def _allocation(request: JobRequest) -> list[str]:
    """What nodes, how many, for how long, at whose cost: the same for sbatch and salloc.

    GPUs by --gpus-per-node alone: beside --gres it is refused, and --gpus-per-task hides a rank's neighbours from it.
    """
    resource = request.resource
    options = [f"--nodes={request.nodes}", f"--ntasks-per-node={request.tasks_per_node}"]
    options += _cores(request.cores_per_task)
    if request.gpus_per_node:
        kind = f"{resource.gpu_type}:" if resource is not None and resource.gpu_type else ""
        options.append(f"--gpus-per-node={kind}{request.gpus_per_node}")
    if resource is not None and not resource.fraction:
        # --exclusive alone gives all cores and GPUs, but no more memory than is asked for.
        options += ["--exclusive", "--mem=0"]
    elif resource is not None and resource.memory_gib is not None:
        options.append(f"--mem={int(resource.memory_gib * 1024)}M")
    if request.time_s is not None:
        minutes, seconds = divmod(request.time_s, 60)
        options.append(f"--time={minutes // 60}:{minutes % 60:02d}:{seconds:02d}")
    words = (("partition", request.queue), ("account", request.group), ("reservation", request.reservation))
    return options + [f"--{name}={word}" for name, word in words if word is not None]


def _own_options(request: JobRequest) -> list[str]:
    """The profile's own directives, last, so that they win."""
    resource = request.resource
    return [*request.profile.options, *(resource.options if resource is not None else ())]


def _cores(of_task: int | None) -> list[str]:
    """Always said, also to srun: from 22.05 to 23.02 a step does not inherit it (RELEASE_NOTES of 22.05 and 23.11)."""
    return [f"--cpus-per-task={of_task}"] if of_task is not None else []


def _warning_s(request: JobRequest) -> int:
    """Seconds before the limit at which job.sh is warned; the signal may come up to 60 s earlier (sbatch(1)).

    Where llmctl knows the limit job.sh has a timer of its own, and the signal is for what the timer cannot know: a
    limit that was shortened, or another job that takes the nodes.
    """
    grace_s = request.profile.stop_grace_s
    if request.time_s is None:
        return min(grace_s, _SIGNAL_LIMIT_S)
    return min(max(grace_s - 60, 15), request.time_s // 2, _SIGNAL_LIMIT_S)


def _amount(request: JobRequest) -> str:
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    return f"{nodes} with {request.gpus_per_node} GPUs each" if request.gpus_per_node else nodes


def _attached(container: ContainerPlan | None) -> ContainerPlan | None:
    """The container of a visitor: pyxis finds a running one by its name, and one without a name cannot be entered.

    A visitor who leaves saves nothing: --container-save would write over the run's own file.
    """
    if container is None or container.runtime != "pyxis" or container.site.name is None:
        return container if container is not None and container.runtime != "pyxis" else None
    name = container.site.name.partition(":")[0]
    return replace(container, site=container.site.model_copy(update={"name": f"{name}:exec", "save": None}))


def _on_terminal(
    argv: Sequence[str], container: ContainerPlan | None, script: str, command: Sequence[str], told: str = ""
) -> list[str]:
    """``argv`` as one bash command; with --pty where there is a terminal: without one srun would complain and go on."""
    lines = [_FORGET, "pty=()", "if [[ -t 0 ]]; then pty=(--pty); fi"]
    if told:
        lines.append(f"echo {shlex.quote(told)} >&2")
    words: tuple[str, ...] = ("bash", "-c", script, "bash", *command)
    if container is not None and container.prefix:
        words = (*container.prefix, container.argument, *words)
    elif container is not None:
        words = (*container.srun_options, *words)
    lines.append(f'exec {shlex.join(argv)} "${{pty[@]}}" {shlex.join(words)}')
    return ["bash", "-c", "\n".join(lines)]


def _plain_id(text: str) -> str | None:
    """``13`` of ``13``, ``13_4``, ``13_[2-3%2]``, ``13+0`` and ``13;cluster``."""
    match = re.match(r"(\d+)(?![\d.])", text.strip())
    return match[1] if match else None


def _parse_queue_line(line: str) -> JobReport | None:
    fields = line.split("|", 5)
    if len(fields) < 6 or (job_id := _plain_id(fields[0])) is None:
        return None
    _, raw, start, hosts, reason, name = fields
    state = words.STATES.get(raw, JobState.UNKNOWN)
    return JobReport(
        job_id=job_id,
        state=state,
        raw=raw,
        name=name,
        reason=words.in_words(reason, raw) if _is_telling(state, reason) else "",
        expected_start=start if state is JobState.PENDING and start[:1].isdecimal() else None,
        hosts=words.expand_hosts(hosts),
    )


def _is_telling(state: JobState, reason: str) -> bool:
    """Whether the reason is of this state: a cancelled job still has the one that it waited for."""
    return state is not JobState.COMPLETED and (state is not JobState.CANCELLED or reason.startswith("DependencyNever"))


def _by_job(reports: Iterable[JobReport | None]) -> dict[str, JobReport]:
    found: dict[str, JobReport] = {}
    for report in reports:
        if report is None:
            continue
        other = found.get(report.job_id)
        found[report.job_id] = report if other is None else _joined(other, report)
    return found


def _joined(one: JobReport, other: JobReport) -> JobReport:
    order = [*_FINISHED_FIRST, *(state for state in JobState if state not in _FINISHED_FIRST)]
    first = min(one, other, key=lambda report: order.index(report.state))
    return replace(first, hosts=tuple(dict.fromkeys((*one.hosts, *other.hosts))))


def _parse_record(job_id: str, state: str, exit_code: str, hosts: str, name: str) -> JobReport:
    # CANCELLED by 1000
    raw = state.partition(" ")[0].rstrip("+")
    known = words.STATES.get(raw, JobState.UNKNOWN)
    reason = words.STATE_REASONS.get(raw, "")
    if raw == "CANCELLED" and " by " in state:
        reason = f"cancelled by user {state.partition(' by ')[2]}"
    return JobReport(
        job_id=job_id,
        state=known,
        raw=state,
        name=name,
        reason=reason,
        hosts=words.expand_hosts(hosts) if hosts != "None assigned" else (),
        exit_code=_exit_code(exit_code, known),
    )


def _exit_code(text: str, state: JobState) -> int | None:
    """Of ``code:signal``. Slurm writes 0:0 also for what it has ended itself: that says nothing."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    code = 128 + int(match[2]) if int(match[2]) else int(match[1])
    return code if code or state is JobState.COMPLETED else None


def _newest(found: Sequence[tuple[str, JobReport]]) -> JobReport:
    ordered = sorted(found, key=lambda one: one[0])
    report = ordered[-1][1]
    # Parts of an array are submitted together; the same name at another time is the same job, started again.
    times = {time for time, one in ordered if one.name == report.name}
    return replace(report, restarts=len(times) - 1)


BACKEND = SlurmBackend()
