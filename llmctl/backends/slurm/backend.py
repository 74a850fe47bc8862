"""Slurm, 22.05 and later. Parses the text that every version prints: JSON came late, and its keys change.

Sources: sbatch(1), squeue(1), sacct(1), salloc(1), srun(1), scancel(1), https://slurm.schedmd.com/.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmctl.backends.base import (
    LOGIN,
    DoctorCommands,
    HostCommand,
    JobReport,
    JobRequest,
    NodeReport,
    ProfileHints,
)
from llmctl.backends.batch_scheduler import BatchScheduler, ErrorMessages
from llmctl.backends.slurm import words
from llmctl.durations import clock
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan

_CARRIED = (
    "HOME,USER,LOGNAME,SHELL,PATH,LANG,LC_ALL,MODULEPATH,MODULESHOME,LMOD_CMD,LMOD_DIR,LMOD_PKG,LMOD_SYSTEM_NAME,"
    "LMOD_SYSTEM_DEFAULT_MODULES,SLURM_CONF,XDG_STATE_HOME"
)
"""Variables of the login node that a job gets. All others could be secrets, and the accounting would keep them."""

_FIELDS = "%i|%T|%S|%N|%r|%j"
"""Format of squeue: id, state, start, hosts, reason, and last the name, the only field with arbitrary text."""

_ACCOUNTED = "JobID,Submit,State,ExitCode,NodeList,JobName"

_FORGET = (
    "unset $(env | LC_ALL=C sed -nE '/^SLURM_(CONF|JWT)/d; "
    r"s/^(S(BATCH|ALLOC|RUN|QUEUE|ACCT|CANCEL|CONTROL|INFO|LURM)_[A-Za-z0-9_]+)=.*/\1/p')"
)
"""Shell text that unsets the variables of the user, or of an enclosing job, that would override a command's options or
change its output ("INPUT ENVIRONMENT VARIABLES" of sbatch(1): "will override any options set in a batch script").
SLURM_* would even be passed on in spite of --export. The variables that locate the controller stay."""

_OTHER_CLUSTER = re.compile(r"\s*(-M|--clusters?\b(?!-))")

_TIMEOUT_S = 60
"""Seconds to wait for an interactive allocation."""

_SIGNAL_LIMIT_S = 65535  # sbatch(1): "--signal": "sig_time must have an integer value between 0 and 65535"

_UNFINISHED_FIRST = (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN)
"""Order of states by which the parts of a job (array, heterogeneous job) decide: unfinished parts first."""


@dataclass(frozen=True)
class SlurmBackend(BatchScheduler):
    """Backend for Slurm."""

    name: str = "slurm"
    template: str = "slurm.sh.j2"
    job_keys: frozenset[str] = BatchScheduler.job_keys | {"exclude"}
    messages: ErrorMessages = words.MESSAGES
    launchers: tuple[str, ...] = ("torchrun", "srun", "mpirun")

    def profile_hints(self) -> ProfileHints:
        """See llmctl.backends.slurm.setup."""
        from llmctl.backends.slurm.setup import PROFILE_HINTS

        return PROFILE_HINTS

    def doctor_commands(self) -> DoctorCommands:
        """See llmctl.backends.slurm.setup."""
        from llmctl.backends.slurm.setup import DOCTOR_COMMANDS

        return DOCTOR_COMMANDS

    def priority_problem(self, priority: int) -> str:
        """Refuse priorities above 0, a negative --nice (sbatch(1): "Only privileged users can specify a negative")."""
        if priority <= 0:
            return ""
        return (
            f"{priority} is above 0, and Slurm users can only lower their priority: give 0 or below; to go first, use "
            "a quality of service of the site, such as --qos=NAME in the profile's options"
        )

    def options_problem(self, options: Sequence[str]) -> str:
        """Refuse options that send jobs to another cluster, whose queue llmctl does not query."""
        wrong = next((option for option in options if _OTHER_CLUSTER.match(option)), None)
        if wrong is None:
            return ""
        return (
            f"{wrong!r} sends jobs to another Slurm cluster, where llmctl could neither find nor cancel them; "
            "make a profile for that cluster (llmctl clusters new) with its login.host, or call llmctl with "
            "SLURM_CONF set to its slurm.conf"
        )

    def job_name(self, run_id: str) -> str:
        """The run id itself: Slurm accepts any name."""
        return run_id

    def directives(self, request: JobRequest) -> list[str]:
        """Options for the head of job.sh. ``priority`` becomes --nice, the only priority that users may set."""
        options = ["--output=job.log", "--open-mode=append"]
        if request.priority is not None:
            options.append(f"--nice={-request.priority}")
        # After a node failure or a preemption Slurm requeues the job, and a new attempt continues.
        options += ["--requeue", f"--signal=B:USR1@{_warning_s(request)}"]
        if request.after:
            kind = "afterany" if request.after_any else "afterok"
            options += [f"--dependency={kind}:{':'.join(request.after)}", "--kill-on-invalid-dep=yes"]
        return [f"--job-name={request.job_name}", *_allocation(request, options)]

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """``sbatch`` in the run directory; the script gets only the variables of _CARRIED from our environment."""
        del request
        return [HostCommand(LOGIN, tuple(_plain("sbatch", "--parsable", f"--export={_CARRIED}", "job.sh")))]

    def parse_job_id(self, output: str) -> str:
        """Id in ``id``, ``id;cluster`` or ``Submitted batch job id``; ignores the lines of a site's plugins."""
        for line in reversed(output.splitlines()):
            match = re.fullmatch(r"(\d+)(?:;\S+)?|Submitted batch job (\d+)(?: on cluster \S+)?", line.strip())
            if match:
                return match[1] or match[2]
        raise SchedulerError(f"sbatch printed no job id but {output.strip()[-500:]!r}", transient=False)

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """``salloc`` with one step on the first node; --overlap lets the user start further steps."""
        options = [f"--job-name={request.job_name}", *_allocation(request)]
        step = ["--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--cpu-bind=none"]
        step += _cores(request.cores_per_node)
        announcement = f"llmctl: requesting {_amount(request)}; giving up after {_TIMEOUT_S} s if none is free"
        argv = ["salloc", f"--immediate={_TIMEOUT_S}", *options, "srun", *step]
        return _on_terminal(argv, request.container, script, command, announcement)

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
        """``srun`` for a step beside the ranks. Since 20.11 steps share resources only with --overlap."""
        step = [f"--jobid={job_id}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", *_cores(cores)]
        argv = ["srun", *step, "--mpi=none", "--cpu-bind=none"]
        return _on_terminal(argv, _attached(container), script, command)

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """``squeue`` for all of the user's jobs: with ids, one forgotten job would fail the whole call.

        Ended jobs stay in the queue for some minutes (MinJobAge), which helps at sites without accounting.
        """
        del job_ids
        return _plain("squeue", "--noheader", "--me", "--all", "--states=all", f"--format={_FIELDS}")

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """One report per job; the parts of an array or heterogeneous job are merged."""
        return _by_job(_parse_queue_line(line) for line in output.splitlines())

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """True if the job is no longer known; any other failure is not an answer."""
        return exit_status == 0 or "Invalid job id specified" in stderr

    def find_argv(self, job_name: str) -> list[str]:
        """``squeue`` for the user's jobs of one name, also those that have just ended."""
        return [*self.status_argv(()), f"--name={job_name}"]

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str] | None:
        """``sacct`` with --duplicates, otherwise it shows only one record of a requeued job or a reused id."""
        wanted = ["--jobs", ",".join(job_ids), f"--format={_ACCOUNTED}"]
        return _plain("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", *wanted)

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """Newest record of each job, by submission time; each requeue makes a record."""
        records: dict[str, list[tuple[str, JobReport]]] = {}
        for line in output.splitlines():
            fields = line.split("|", 5)
            if len(fields) == 6 and (job_id := _plain_id(fields[0])):
                records.setdefault(job_id, []).append((fields[1], _parse_record(job_id, *fields[2:])))
        return {job_id: _newest(found) for job_id, found in records.items()}

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """``scancel``: TERM for ranks and job.sh, KILL after the site's KillWait. Silent about ended jobs."""
        return [HostCommand(LOGIN, tuple(_plain("scancel", *job_ids)))]

    def nodes_argv(self) -> list[list[str]]:
        """See llmctl.backends.slurm.nodes."""
        return [_plain("scontrol", "--details", "--oneliner", "--all", "show", "nodes")]

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """See llmctl.backends.slurm.nodes."""
        from llmctl.backends.slurm.nodes import parse_nodes

        return [node for output in outputs for node in parse_nodes(output)]


def _plain(*argv: str) -> list[str]:
    """Slurm command without the variables of _FORGET (see transport.protocol.program_of)."""
    return ["sh", "-c", f'{_FORGET}; exec "$0" "$@"', *argv]


def _allocation(request: JobRequest, further: Sequence[str] = ()) -> list[str]:
    """Options for nodes, cores, GPUs, memory, time and account, then ``further`` and the profile's own.

    GPUs by --gpus-per-node alone: Slurm refuses it together with --gres, and with --gpus-per-task a rank does not see
    the GPUs of its neighbours.
    """
    resource, own = request.resource, request.site_options
    options = [f"--nodes={request.nodes + request.spare_nodes}", f"--ntasks-per-node={request.tasks_per_node}"]
    options += _cores(request.cores_per_node, request.tasks_per_node)
    if request.gpus_per_node:
        kind = f"{resource.gpu_type}:" if resource is not None and resource.gpu_type else ""
        options.append(f"--gpus-per-node={kind}{request.gpus_per_node}")
    if resource is not None and not resource.fraction:
        # --exclusive alone gives all cores and GPUs, but only the requested memory.
        options += ["--exclusive", "--mem=0"]
    elif resource is not None and resource.memory_gib is not None:
        options.append(f"--mem={int(resource.memory_gib * 1024)}M")
    if request.spare_nodes:
        # A lost node ends the steps on it, and not the job (sbatch(1)).
        options.append("--no-kill")
    if request.time_s is not None:
        options.append(f"--time={clock(request.time_s)}")
    words = (("partition", request.queue), ("account", request.group), ("reservation", request.reservation))
    options += [f"--{name}={word}" for name, word in words if word is not None]
    return [*options, *further, *own, *_exclusion(request)]


def _exclusion(request: JobRequest) -> list[str]:
    """Option for the nodes to leave out, with those of the profile's own option: of two, sbatch obeys the last."""
    if not request.exclude:
        return []
    own = (re.match(r"(?:--exclude[=\s]|-x)\s*(\S+)", option) for option in request.site_options)
    return [f"--exclude={','.join([*(match[1] for match in own if match is not None), *request.exclude])}"]


def _cores(of_node: int | None, tasks: int = 1) -> list[str]:
    """Option for the cores of each task of a node, for srun too.

    From 22.05 to 23.02 a step does not inherit it (RELEASE_NOTES of 22.05 and 23.11).
    """
    return [f"--cpus-per-task={of_node // tasks}"] if of_node is not None else []


def _warning_s(request: JobRequest) -> int:
    """Seconds before the limit at which job.sh gets its signal, which may come up to 60 s earlier (sbatch(1)).

    If llmctl knows the limit, job.sh has its own timer. The signal then covers what the timer cannot know: a shortened
    limit, or a preemption.
    """
    grace_s = request.profile.stop_grace_s
    if request.time_s is None:
        return min(grace_s, _SIGNAL_LIMIT_S)
    return min(max(grace_s - 60, 15), request.time_s // 2, _SIGNAL_LIMIT_S)


def _amount(request: JobRequest) -> str:
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    return f"{nodes} with {request.gpus_per_node} GPUs each" if request.gpus_per_node else nodes


def _attached(container: "ContainerPlan | None") -> "ContainerPlan | None":
    """Container for a step that attaches to a run: pyxis finds a running container only by its name.

    The step saves nothing: --container-save would overwrite the run's own file.
    """
    if container is None or container.runtime != "pyxis" or container.site.name is None:
        return container if container is not None and container.runtime != "pyxis" else None
    name = container.site.name.partition(":")[0]
    return replace(container, site=container.site.model_copy(update={"name": f"{name}:exec", "save": None}))


def _on_terminal(
    argv: Sequence[str], container: "ContainerPlan | None", script: str, command: Sequence[str], announcement: str = ""
) -> list[str]:
    """``argv`` as one bash command, with --pty if there is a terminal: without one srun would complain about --pty."""
    lines = [_FORGET, "pty=()", "if [[ -t 0 ]]; then pty=(--pty); fi"]
    if announcement:
        lines.append(f"echo {shlex.quote(announcement)} >&2")
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
        reason=_telling(state, raw, reason),
        expected_start=start if state is JobState.PENDING and start[:1].isdecimal() else None,
        hosts=words.expand_hosts(hosts),
    )


def _telling(state: JobState, raw: str, reason: str) -> str:
    """Words for the reason if it belongs to this state: a cancelled job keeps the reason for which it waited."""
    if state is JobState.CANCELLED:
        return words.LOST_DEPENDENCY if reason.startswith("DependencyNever") else ""
    return "" if state is JobState.COMPLETED else words.in_words(reason, raw)


def _by_job(reports: Iterable[JobReport | None]) -> dict[str, JobReport]:
    found: dict[str, JobReport] = {}
    for report in reports:
        if report is None:
            continue
        other = found.get(report.job_id)
        found[report.job_id] = report if other is None else _joined(other, report)
    return found


def _joined(one: JobReport, other: JobReport) -> JobReport:
    order = [*_UNFINISHED_FIRST, *(state for state in JobState if state not in _UNFINISHED_FIRST)]
    first = min(one, other, key=lambda report: order.index(report.state))
    return replace(first, hosts=tuple(dict.fromkeys((*one.hosts, *other.hosts))))


def _parse_record(job_id: str, state: str, exit_code: str, hosts: str, name: str) -> JobReport:
    # Such as "CANCELLED by 1000".
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
    """Exit code of ``code:signal``; None for 0:0 of an unsuccessful job, which Slurm itself has ended."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    code = 128 + int(match[2]) if int(match[2]) else int(match[1])
    return code if code or state is JobState.COMPLETED else None


def _newest(found: Sequence[tuple[str, JobReport]]) -> JobReport:
    ordered = sorted(found, key=lambda one: one[0])
    report = ordered[-1][1]
    # Parts of an array are submitted together. A record of the same name at another time is a requeue of the job.
    times = {time for time, one in ordered if one.name == report.name}
    return replace(report, restarts=len(times) - 1)


BACKEND = SlurmBackend()
