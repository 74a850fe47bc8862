"""IBM Spectrum LSF 10.1: submitted with bsub, asked with bjobs, bhist and bhosts.

Written after the manual (https://www.ibm.com/docs/en/spectrum-lsf/10.1.0, command reference) and recorded output
(tests/recorded/lsf/README.md); never run on a real LSF.
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
from llmctl.backends.lsf.interactive import ENTER, SUBMIT
from llmctl.backends.lsf.reports import DELIMITER, FIELDS, parse_history, parse_jobs, parse_nodes
from llmctl.backends.ssh_attach import ssh_argv
from llmctl.errors import SchedulerError

if TYPE_CHECKING:
    from llmctl.site.container import ContainerPlan

_BJOBS = ("bjobs", "-a", "-noheader", "-o", f"{' '.join(FIELDS)} delimiter='{DELIMITER}'")
"""With the jobs that have ended within CLEAN_PERIOD, an hour by default (bjobs(1), -a)."""

# LSB_BJOBS_CONSISTENT_EXIT_CODE in lsf.conf(5); "No matching job found": lsb_errmsg of OpenLava, lsb.err.c.
_ABOUT_ONE_JOB = re.compile(r"Job <[^>]*> is not found|No unfinished job found|No matching job found")
# lsb_errmsg of OpenLava (lsbatch/lib/lsb.err.c), which is of LSF's code; "Cannot connect to LSF" is printed while bsub
# and bjobs of LSF 9 and 10 try again. "Request from non-LSF host" was seen to pass: equinor/ert, test_lsf_driver.py.
_TRANSIENT = (
    r"LSF is down|Cannot connect to LSF|LIM is down|Communication time ?out|Timeout on connect call to server"
    r"|Connection refused by server|Server is not connected|Request from non-LSF host rejected"
    r"|batch daemon internal error"
)
# Said before anything is sent, or by a server that refuses.
_NOT_TAKEN = (
    r"LSF is down|Cannot connect to LSF|LIM is down|Timeout on connect call to server|Connection refused by server"
    r"|Request from non-LSF host rejected"
)
_PERHAPS_TAKEN = r"Communication time ?out|Server is not connected|internal error"
# Recorded refusals: tests/recorded/lsf/bsub_refused.txt. The others: lsb_errmsg.
_ADVICE = (
    (r"No such queue", "see `bqueues` for the queues there are; give one with --queue or --resource-type"),
    (r"User cannot use the queue", "your account may not use this queue; see `bqueues -l QUEUE` and --queue"),
    (r"Queue has been closed", "the queue takes no jobs now; see `bqueues`, or choose another with --queue"),
    (r"Too many processors requested", "ask for fewer --nodes, or set cores of the resource type to a host's slots"),
    (r"Cannot exceed queue's hard limit", "ask for a shorter --time; see `bqueues -l QUEUE`"),
    (
        r"[Pp]roject|user group|User group",
        "give the project or user group that pays with --group, or `llmctl clusters setup`; group_option is -P or -G",
    ),
    (r"Error (?:near|in|with)|resource requirement", "a resource requirement in the profile's options is wrong"),
    (r"Bad user priority|Job priority control undefined", "this LSF lets no user set a priority of this size"),
    (r"Queue does not accept EXCLUSIVE jobs", "remove -x from the profile's options, or choose another --queue"),
    (r"Request aborted by esub", "the site's own check refused the job; its message stands above"),
)
_MESSAGES = ErrorMessages(_TRANSIENT, _NOT_TAKEN, _PERHAPS_TAKEN, _ADVICE)

# Set by profile.lsf on the login node (cshrc.lsf and profile.lsf in the configuration reference); blaunch needs them.
# Nothing else of the submitting environment goes along: it may hold secrets, and bjobs -env shows it.
_CARRIED = ("PATH", "LSF_BINDIR", "LSF_ENVDIR", "LSF_LIBDIR", "LSF_SERVERDIR")


@dataclass(frozen=True)
class LsfBackend(BatchScheduler):
    """Answers for LSF."""

    name: str = "lsf"
    template: str = "lsf.sh.j2"
    messages: ErrorMessages = _MESSAGES

    def profile_hints(self) -> ProfileHints:
        """See llmctl.backends.lsf.setup."""
        from llmctl.backends.lsf.setup import PROFILE_HINTS

        return PROFILE_HINTS

    def doctor_commands(self) -> DoctorCommands:
        """See llmctl.backends.lsf.setup."""
        from llmctl.backends.lsf.setup import DOCTOR_COMMANDS

        return DOCTOR_COMMANDS

    def priority_problem(self, priority: int) -> str:
        """Users' priorities begin at 1 (bsub -sp); the largest is the site's MAX_USER_PRIORITY."""
        return "" if priority >= 1 else f"{priority} is below 1, the lowest priority of LSF"

    def job_name(self, run_id: str) -> str:
        """The run id itself: bsub -J takes up to 4094 characters."""
        return run_id

    def directives(self, request: JobRequest) -> list[str]:
        """Resources, who pays, and one file for all output."""
        directives = [
            f"-J {request.job_name}",
            *_resources(request),
            # Without -e standard error goes there too. Relative to the folder of the submission (bsub -o).
            "-o job.log",
            # Queued again, with the same id, if the first host is lost (bsub -r).
            "-r",
        ]
        if request.priority is not None:
            directives.append(f"-sp {request.priority}")
        if request.after:
            condition = "ended" if request.after_any else "done"
            directives.append(f'-w "{" && ".join(f"{condition}({job_id})" for job_id in request.after)}"')
        return directives

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """Directives count only in a script that bsub reads from its standard input (bsub(1), command)."""
        del request
        return [HostCommand(LOGIN, ("sh", "-c", "exec bsub <job.sh"))]

    def parse_job_id(self, output: str) -> str:
        """The last ``Job <123> is submitted to queue <normal>.``: messages of an esub stand before it."""
        ids = re.findall(r"^Job <(\d+)> is submitted to ", output, re.MULTILINE)
        if not ids:
            raise SchedulerError(f"bsub printed no job id but {output!r}", transient=False)
        return str(ids[-1])

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """Bjobs with columns of our own."""
        return [*_BJOBS, *job_ids]

    def parse_status(self, output: str) -> dict[str, JobReport]:
        """See llmctl.backends.lsf.reports."""
        return parse_jobs(output)

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        """True also for unknown jobs; sites choose between exit status 0 and 255."""
        said = [line for line in stderr.splitlines() if line.strip()]
        return exit_status == 0 or (bool(said) and all(_ABOUT_ONE_JOB.search(line) for line in said))

    def find_argv(self, job_name: str) -> list[str]:
        """By name, among unfinished jobs and those that have just ended."""
        return [*_BJOBS, "-J", job_name]

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str]:
        """All event logs (-n 0): a busy LSF begins a new one within minutes."""
        return ["bhist", "-n", "0", "-l", *job_ids]

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        """See llmctl.backends.lsf.reports."""
        return parse_history(output)

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        """INT, TERM and KILL for jobs on one host, and KILL at once for others unless the site says otherwise.

        See LSB_USE_SEQUENTIAL_SIGNAL in lsf.conf(5). Who wants the run to save tells it before, by attempts/K/cancel.
        """
        return [HostCommand(LOGIN, ("bkill", *job_ids))]

    def nodes_argv(self) -> list[list[str]]:
        """Whole words (-w), and every host for itself (-X)."""
        return [["bhosts", "-w", "-X"]]

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """See llmctl.backends.lsf.reports."""
        return [node for output in outputs for node in parse_nodes(output)]

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """By bsub -Is, which says that it waits."""
        options = ["-J", request.job_name, *(word for line in _resources(request) for word in shlex.split(line))]
        root = request.profile.runs_root or "."
        return ["bash", "-c", SUBMIT, "bash", root, ENTER, str(len(options)), *options, script, "bash", *command]

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
        """By ssh: battach(1) reaches the first host only, and takes a shell but no command."""
        del job_id, container, cores
        return ssh_argv(host, script, command)


def _resources(request: JobRequest) -> list[str]:
    """Resources of batch and interactive jobs; slots are cores, where the profile gives cores."""
    resource = request.resource
    slots = (resource.cores if resource is not None else None) or request.ranks_per_node
    lines = [f"-n {(request.nodes + request.spare_nodes) * slots}", f'-R "span[ptile={slots}]"']
    if request.gpus_per_node:
        # Per host by default (bsub -gpu). j_exclusive keeps other jobs off these GPUs; the default shares them.
        kind = f":gmodel={resource.gpu_type}" if resource is not None and resource.gpu_type else ""
        lines.append(f'-gpu "num={request.gpus_per_node}:j_exclusive=yes{kind}"')
    if request.time_s is not None:
        minutes = -(-request.time_s // 60)
        lines.append(f"-W {minutes // 60}:{minutes % 60:02d}")
    queue = request.queue or (resource.queue if resource is not None else None)
    group = request.profile.group_option or "-P"
    words = (("-q", queue), ("-U", request.reservation), (group, request.group))
    lines += [f"{flag} {word}" for flag, word in words if word is not None]
    lines.append(f'-env "{", ".join(_CARRIED)}"')
    return [*lines, *request.site_options]


BACKEND = LsfBackend()
