"""Grid Engine: 8.1.9, and the versions of Univa (ABCI 2.0) and Altair (TSUBAME 4.0).

Parses text, never -xml: some builds do not print XML.

Sources: submit(1), qstat(1), qacct(1), qhost(1), sge_status(5) of 8.1.9; for groups (-g), node types (-l TYPE=N) and
the SIM messages https://docs.abci.ai/v2/en/job-execution/.

Jobs do not request a warning signal (-notify): at qdel and at the time limit the signal ends every task that does not
handle it. job.sh has its own timer.
"""

import re
import shlex
from collections.abc import Sequence
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
from llmctl.backends.sge import reports, terminal
from llmctl.durations import clock
from llmctl.errors import ProfileError, SchedulerError

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan

_ASK_QUEUE = r"""answer=$(qstat -r -u '$user') || exit
printf '%s\n' "$answer"
ids=$(printf '%s\n' "$answer" | awk -v asked=" $* " '
    $1 ~ /^[0-9]+$/ && index(asked, " " $1 " ") {
        for (i = 4; i <= NF; i++) if ($i ~ /^[0-9]+[-\/][0-9]+[-\/][0-9]+/) break
        if ($(i - 1) ~ /[qwE]/ && n++ < 50) { printf "%s%s", separator, $1; separator = "," }
    }')
if [ -n "$ids" ]; then qstat -j "$ids" 2>/dev/null; fi
exit 0
"""
"""The user's jobs, and reasons for the requested jobs that wait. ``$user`` is qstat's own word for the caller."""

ACCOUNTING_S = 60
"""Limit for one query of the accounting: every qacct reads the whole file, which has gigabytes at large sites."""
_ASK_ACCOUNTING = r"""end=$(($(date +%s) + $1)) status=0
shift
all=$#
while [ $# -gt 0 ]; do
    seconds=$((end - $(date +%s))) code=124
    if [ "$seconds" -gt 0 ]; then answer=$(timeout "$seconds" qacct -j "$1"); code=$?; fi
    if [ "$code" -eq 124 ]; then
        echo "qacct is slow: it was asked about $((all - $#)) of $all jobs, the newest first" >&2
        exit 124
    fi
    printf '%s\n' "$answer"
    if [ "$code" -ne 0 ]; then status=$code; fi
    shift
done
exit "$status"
"""

_NOT_KNOWN = re.compile(
    r"job id \d+ not found|^Following jobs do not exist|^[\d, ]+$|denied: job \"?\d+\"? does not exist"
)
_TRANSIENT = (
    r"(?i)commlib|unable to (?:send|contact|connect)|can'?t (?:connect|contact)|cannot (?:connect|contact|reach)|"
    r"failed receiving gdi request|got (?:send|select|no|read) (?:error|connection)|timeout|qmaster"
)
# The connection failed. A busy master may still carry out a request that was sent.
_NOT_TAKEN = r"(?i)connection refused|can'?t connect|cannot connect|can'?t resolve host"
_PERHAPS_TAKEN = r"(?i)failed receiving gdi request|got read error|timeout"
_ADVICE = (
    (
        r'requested project "[^"]*" does not exist',
        "the group is missing or not one of yours: give a group by --group, LLMCTL_GROUP or `llmctl clusters setup`",
    ),
    (
        r"no project assigned to job",
        "this site runs no job without a group: give one by --group, LLMCTL_GROUP or `llmctl clusters setup`",
    ),
    (
        r'invalid option argument "?-g',
        "this Grid Engine does not support groups (-g): leave the group out",
    ),
    (r'unknown resource "', "this site has no such resource type; `llmctl clusters show` lists the profile's"),
    (r"unknown queue|no suitable queues", "there is no such queue for this job; leave --queue out or choose another"),
    (r"advance reservation id .* (?:is invalid|does not exist)", "there is no such reservation: see qrstat"),
    (r"is not a time value", "give the time as H:M:S"),
    (r"10 mins with this group", "without a group TSUBAME runs trials of up to 10 minutes only: give --group"),
    (r"SIM0021", "the site does not accept a value of the request: check resource type, time and options"),
    (r"SIM4403", "the group has too few points left for nodes x time: request less, or have points added"),
    (r"SIM4702", "more than the site's limits allow: fewer nodes, less time, or fewer jobs at once"),
    (r"could not be scheduled, try again later", "no nodes are free at the moment: try again later or request less"),
    (r"necessary privileges to delete", "the job belongs to another user"),
)
"""(pattern of the error, advice). SIM messages: https://docs.abci.ai/v2/en/job-execution/."""
_MESSAGES = ErrorMessages(_TRANSIENT, _NOT_TAKEN, _PERHAPS_TAKEN, _ADVICE)


@dataclass(frozen=True)
class SgeBackend(BatchScheduler):
    """Backend for Grid Engine."""

    name: str = "sge"
    template: str = "sge.sh.j2"
    job_keys: frozenset[str] = BatchScheduler.job_keys | {"exclude"}
    messages: ErrorMessages = _MESSAGES
    tells_ends_apart: bool = False

    def profile_hints(self) -> ProfileHints:
        """See llmctl.backends.sge.setup."""
        from llmctl.backends.sge.setup import PROFILE_HINTS

        return PROFILE_HINTS

    def doctor_commands(self) -> DoctorCommands:
        """See llmctl.backends.sge.setup."""
        from llmctl.backends.sge.setup import DOCTOR_COMMANDS

        return DOCTOR_COMMANDS

    def job_name(self, run_id: str) -> str:
        """The run id, with ``j`` before a digit: names may not begin with digits (submit(1), -N and sge_types(1))."""
        return f"j{run_id}" if run_id[0].isdecimal() else run_id

    def directives(self, request: JobRequest) -> list[str]:
        """Options for the head of job.sh: all but the group, which is accepted on the command line only."""
        directives = [
            f"-N {request.job_name}",
            *_allocation(request),
            # The site's shell may be csh, and may ignore the first line of a script (queue_conf(5), shell_start_mode).
            "-S /bin/bash",
            "-cwd",
            "-j y",
            "-o job.log",
            # If a node dies the job is requeued, and a new attempt continues from the last checkpoint.
            "-r y",
        ]
        if request.after:
            # Grid Engine cannot wait for a success: it waits for any end.
            directives.append(f"-hold_jid {','.join(request.after)}")
        return directives

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """``qsub`` in the run directory, without -V: the job gets none of our environment."""
        group = ("-g", request.group) if request.group is not None else ()
        return [HostCommand(LOGIN, ("qsub", *group, "job.sh"))]

    def next_job_argv(self, request: JobRequest) -> tuple[str, ...]:
        """``qsub``, also where it is not in the PATH of a job: jobs have SGE_ROOT and ARC (submit(1))."""
        (command,) = self.submit_commands(request)
        return ("sh", "-c", 'PATH=$PATH:${SGE_ROOT-}/bin/${ARC-}; exec "$0" "$@"', *command.argv)

    def parse_job_id(self, output: str) -> str:
        """Id in ``Your job 1 ("x") has been submitted`` or in -terse's ``1``; ignores the site's own lines."""
        match = re.search(r"^Your job(?:-array)? (\d+)", output, re.MULTILINE) or re.search(
            r"^(\d+)(?:\.\d+-\d+:\d+)?[ \t]*$", output, re.MULTILINE
        )
        if match is None:
            raise SchedulerError(f"qsub printed no job id but {output.strip()[-500:]!r}", transient=False)
        return match[1]

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """``qrsh``, which reports at once if no node is free. Its -N keeps odd characters out of the job's name."""
        options = ["-N", request.job_name, *(["-g", request.group] if request.group is not None else [])]
        options += [word for option in _allocation(request) for word in shlex.split(option)]
        nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
        kind = f" of {request.resource_type}" if request.resource_type is not None else ""
        announcement = f"llmctl: requesting {nodes}{kind} from Grid Engine, which refuses at once if none is free"
        return terminal.allocate_argv(announcement, options, script, command)

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
        """``qrsh -inherit``, or ssh if the job accepts no tasks."""
        del container, cores
        return terminal.attach_argv(job_id, host, script, command)

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """``qstat`` for all of the user's jobs, with their whole names."""
        return ["sh", "-c", _ASK_QUEUE, "qstat", *job_ids]

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """See llmctl.backends.sge.reports."""
        return reports.parse_queue(output)

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """True if the job is unknown, or not yet known; any other failure is not an answer."""
        said = [line.strip() for line in stderr.splitlines() if line.strip()]
        return exit_status == 0 or (bool(said) and all(_NOT_KNOWN.search(line) for line in said))

    def find_argv(self, job_name: str) -> list[str]:
        """``qstat`` for all of the user's jobs, because qstat cannot search for a name."""
        del job_name
        return self.status_argv(())

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str] | None:
        """``qacct`` for one job at a time, the newest first, within ``ACCOUNTING_S``."""
        newest = sorted(job_ids, key=lambda job_id: (len(job_id), job_id), reverse=True)
        return ["sh", "-c", _ASK_ACCOUNTING, "qacct", str(ACCOUNTING_S), *newest]

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """See llmctl.backends.sge.reports. A job's record appears about a second after its end."""
        return reports.parse_accounts(output)

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """``qdel``: KILL at once; a run that can save has been told before."""
        return [HostCommand(LOGIN, ("qdel", *job_ids))]

    def nodes_argv(self) -> list[list[str]]:
        """``qhost`` for hosts with queues and resources, qstat for the errors of queues."""
        return [["qhost", "-q", "-F"], ["qstat", "-f", "-explain", "E"]]

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """See llmctl.backends.sge.reports."""
        return reports.parse_hosts(*outputs)


def _allocation(request: JobRequest) -> list[str]:
    """Options for nodes, time, queue, reservation and priority: the same for qsub and qrsh.

    No blank around ``=``: a blank would make the rest an unknown option (https://www.t4.cii.isct.ac.jp/docs/faq.en/scheduler/).

    Raises:
        ProfileError: several nodes are requested without a resource type or -pe.
    """
    own = request.site_options
    options = []
    if request.resource_type is not None:
        options.append(f"-l {request.resource_type}={request.nodes + request.spare_nodes}")
    elif request.nodes + request.spare_nodes > 1 and not any(option.startswith("-pe ") for option in own):
        raise ProfileError(
            f"{request.profile.name}: resource_types: no type is chosen, and Grid Engine allocates nodes by -l TYPE=N; "
            "give --resource-type, or -pe in options"
        )
    if request.time_s is not None:
        options.append(f"-l h_rt={clock(request.time_s)}")
    if request.exclude:
        options.append(f"-l h=!({'|'.join(request.exclude)})")
    words = (("-q", request.queue), ("-ar", request.reservation), ("-p", request.priority))
    return [*options, *(f"{flag} {word}" for flag, word in words if word is not None), *own]


BACKEND = SgeBackend()
