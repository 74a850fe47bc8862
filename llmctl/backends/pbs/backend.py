"""PBS Professional and OpenPBS, release 2020 and later: submits with qsub, parses the text of qstat -f.

Sources: qsub(1B), qstat(1B), qselect(1B), pbsnodes(8B) and the programs' source (https://github.com/openpbs/openpbs).
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from llmctl.backends.pbs.interactive import ENTER, SUBMIT
from llmctl.backends.pbs.reports import parse_jobs, parse_nodes, plain_job_id
from llmctl.backends.ssh_attach import ssh_argv
from llmctl.durations import clock
from llmctl.errors import SchedulerError

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan

_CHUNK = "-l select=:"
"""Prefix of profile options that are added to the chunk of every node, as in ``-l select=:ncpus=64:ngpus=4``."""

# Ids first; -x includes finished jobs. A server without history prints no ids then, and an error message.
_FIND = """flag=-x
ids=$(qselect -x -N "$0") || exit
if [ -z "$ids" ]; then flag=; ids=$(qselect -N "$0") || exit; fi
if [ -n "$ids" ]; then exec qstat $flag -E -f $ids; fi"""

_ABOUT_ONE_JOB = re.compile(r"Unknown Job Id|Job has finished|PBS is not configured to maintain job history")
# pbs_messages.c, and the clients' messages if no server answers.
_TRANSIENT = (
    r"cannot connect to server|Couldn't connect to|No free connections|Server connection table full"
    r"|Connection (?:refused|reset|timed out)|Server shutting down|Batch protocol error|Premature end of message"
    r"|End of File|Resource temporarily unavailable|Request timed out"
)
# Printed before anything is sent, or by a server that refuses. All other errors can follow an accepted job.
_NOT_TAKEN = (
    r"cannot connect to server|Couldn't connect to|No free connections|Server connection table full"
    r"|Connection refused|Server shutting down"
)
_PERHAPS_TAKEN = r"Batch protocol error|Premature end of message|End of File|Request timed out"
_ADVICE = (
    (r"Unknown queue", "`qstat -q` lists the queues; choose one with --queue or --resource-type"),
    (r"Queue is not enabled", "the queue accepts no jobs now; see `qstat -q`, or choose another with --queue"),
    (r"Access to queue is denied", "your group may not use this queue or reservation; see --group and --queue"),
    (r"Unknown Reservation Id", "see `pbs_rstat` for your reservations; give the R number with --reservation"),
    (r"violates queue and/or server resource limits", "ask for fewer --nodes or a shorter --time; see `qstat -Qf`"),
    (r"would exceed|Maximum number of jobs", "you have reached the site's limit of jobs; wait for one to end"),
    (r"Invalid Account|Bad GID|[Pp]roject", "give the group to bill with --group or `llmctl clusters setup`"),
    (r"Unknown resource|illegal -l value", "the profile's options name a resource that this PBS does not know"),
    (r"Bad UID", "submit as an ordinary user: PBS runs no jobs of this user"),
    (r"Invalid Job Dependency", "the job to wait for has left the queue; submit without --after"),
    (r"Unauthorized Request", "your account may not do this; see --group and --queue"),
    (r"cannot connect to server", "the PBS server does not answer; no job was submitted or lost, try again later"),
)
_MESSAGES = ErrorMessages(_TRANSIENT, _NOT_TAKEN, _PERHAPS_TAKEN, _ADVICE)


@dataclass(frozen=True)
class PbsBackend(BatchScheduler):
    """Backend for jobs of a PBS server."""

    name: str = "pbs"
    template: str = "pbs.sh.j2"
    messages: ErrorMessages = _MESSAGES

    def profile_hints(self) -> ProfileHints:
        """See llmctl.backends.pbs.setup."""
        from llmctl.backends.pbs.setup import PROFILE_HINTS

        return PROFILE_HINTS

    def doctor_commands(self) -> DoctorCommands:
        """See llmctl.backends.pbs.setup."""
        from llmctl.backends.pbs.setup import DOCTOR_COMMANDS

        return DOCTOR_COMMANDS

    def job_name(self, run_id: str) -> str:
        """The run id itself: PBS accepts up to 230 letters, digits and ``-_+.`` (pbs_ifl.h, ck_job_name.c)."""
        return run_id

    def directives(self, request: JobRequest) -> list[str]:
        """Resources, the group to bill, and output into one file without delay."""
        return [
            f"-N {request.job_name}",
            *_resources(request),
            # Independent of the user's login shell.
            "-S /bin/bash",
            "-j oe",
            # "d": write the output directly to its destination. Otherwise it appears only after the job's end.
            "-k oed",
            "-r y",
            *([f"-p {request.priority}"] if request.priority is not None else []),
            *([f"-W depend={_dependency(request)}"] if request.after else []),
        ]

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """``qsub`` in the run directory, with file names relative to that folder."""
        del request
        return [HostCommand(LOGIN, ("qsub", "-o", "job.log", "job.sh"))]

    def parse_job_id(self, output: str) -> str:
        """``1234.server``: the last line that is an id, because sites print banners before it."""
        ids = [found for line in output.splitlines() if (found := plain_job_id(line.strip())) is not None]
        if not ids:
            raise SchedulerError(f"qsub printed no job id but {output!r}", transient=False)
        return ids[-1]

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """``qstat`` with one request to the server (-E), which omits unknown jobs."""
        return ["qstat", "-E", "-f", *job_ids]

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """See llmctl.backends.pbs.reports."""
        return parse_jobs(output)

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """True if all errors concern single jobs. Exit status: the last error modulo 256, 153 unknown, 35 ended."""
        if exit_status == 0:
            return True
        said = [line for line in stderr.splitlines() if line.startswith(("qstat:", "qselect:", "pbsnodes:"))]
        return bool(said) and all(_ABOUT_ONE_JOB.search(line) for line in said)

    def find_argv(self, job_name: str) -> list[str]:
        """``qselect`` by name, among queued, running and finished jobs."""
        return ["sh", "-c", _FIND, job_name]

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str]:
        """``qstat -x``: the server's history, as long as the site keeps it (ABCI 3.0: 10 days)."""
        return ["qstat", "-x", "-E", "-f", *job_ids]

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """See llmctl.backends.pbs.reports."""
        return parse_jobs(output)

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """``qdel``: TERM to all processes on the head node, and KILL after the queue's kill_delay.

        The shell that PBS runs around the script (start_exec.c) dies of TERM, and PBS then kills the rest at once.
        To let a run save, llmctl tells it before, by attempts/K/cancel.
        """
        return [HostCommand(LOGIN, ("qdel", *job_ids))]

    def nodes_argv(self) -> list[list[str]]:
        """All nodes with all attributes."""
        return [["pbsnodes", "-a"]]

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """See llmctl.backends.pbs.reports."""
        return [node for output in outputs for node in parse_nodes(output)]

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """``qsub`` -I; prints the request, then the scheduler's reason while the job waits."""
        options = [word for line in _resources(request) for word in shlex.split(line)]
        root = request.profile.runs_root or "."
        count = str(len(options))
        return [
            "bash",
            "-c",
            SUBMIT,
            "bash",
            root,
            _request_text(request),
            ENTER,
            count,
            *options,
            script,
            "bash",
            *command,
        ]

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
        """``ssh`` to the node: PBS's own command (pbs_tmrsh) works inside the job only."""
        del job_id, container, cores
        return ssh_argv(host, script, command)


def _resources(request: JobRequest) -> list[str]:
    """Options that batch and interactive jobs have in common."""
    given = request.site_options
    chunk = "".join(option.removeprefix(_CHUNK[:-1]) for option in given if option.startswith(_CHUNK))
    lines = [*_group(request), *_queue(request)]
    lines.append(f"-l select={request.nodes + request.spare_nodes}:mpiprocs={request.ranks_per_node}{chunk}")
    if request.spare_nodes:
        # By default PBS ends a job that loses a host (PBS Professional Reference Guide, tolerate_node_failures).
        lines.append("-W tolerate_node_failures=all")
    if request.time_s is not None:
        lines.append(f"-l walltime={clock(request.time_s)}")
    variables = [option[2:].strip() for option in given if _is_variable(option)]
    if request.reservation is not None and request.resource_type is not None:
        variables.append(f"RTYPE={request.resource_type}")  # a reservation of ABCI 3.0 holds whole nodes, of any type
    if variables:
        # A second -v would replace the first (qsub.c).
        lines.append(f"-v {','.join(variables)}")
    return [*lines, *(option for option in given if not option.startswith(_CHUNK) and not _is_variable(option))]


def _is_variable(option: str) -> bool:
    return re.match(r"-v\s*\S", option) is not None


def _group(request: JobRequest) -> Iterable[str]:
    if request.group is None:
        return []
    option = request.profile.group_option or "-P"
    return [f"{option}={request.group}" if option == "-W group_list" else f"{option} {request.group}"]


def _queue(request: JobRequest) -> Iterable[str]:
    # The queue of a reservation R1234.server is named R1234.
    queue = request.reservation.partition(".")[0] if request.reservation is not None else request.queue
    if queue is None and request.resource is not None:
        queue = request.resource.queue
    return [f"-q {queue}"] if queue is not None else []


def _dependency(request: JobRequest) -> str:
    return ":".join(["afterany" if request.after_any else "afterok", *request.after])


def _request_text(request: JobRequest) -> str:
    """Text of the request for the user who waits."""
    kind = request.resource_type or request.queue or ("node" if request.nodes == 1 else "nodes")
    where = f" in reservation {request.reservation}" if request.reservation is not None else ""
    time = f" for {clock(request.time_s)}" if request.time_s is not None else ""
    return f"{request.nodes} x {kind}{where}{time}"


BACKEND = PbsBackend()
