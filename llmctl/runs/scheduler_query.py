"""Queries to a scheduler: its queue, its accounting, and jobs by name.

A restarting or overloaded scheduler is queried a few more times. A missing answer differs from an empty answer: only
an empty answer says that a job does not exist.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llmctl.backends.base import JobReport, QueueBackend
from llmctl.errors import ProgramMissing, SchedulerError
from llmctl.transport.protocol import CommandResult, Transport, program_of

NOT_FOUND = 127
"""Exit code of a shell that does not find its command (POSIX, sh, Exit Status)."""
TIMEOUT_S = 90.0
"""Longer than the minute for which Slurm's clients try to reach a controller with a wrong configuration."""
LONGEST_RETRIED_S = 8.0
"""Commands that took at least this long are not retried: Slurm's clients retry themselves for MessageTimeout, 10 s."""
INTERVAL_S = 40.0
"""Shortest time between repeated queries: at most two per minute, for a scheduler with many users."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retries of a command after transient failures.

    Attributes:
        pauses_s: pause before each retry; empty for callers that repeat their query anyway.
        sleep: waits for a number of seconds.
    """

    pauses_s: tuple[float, ...] = (1.0, 3.0)
    sleep: Callable[[float], None] = time.sleep


DEFAULT_RETRIES = RetryPolicy()


@dataclass(frozen=True)
class QueueAnswer:
    """The answer to one query.

    Attributes:
        reports: reports by job id; may include jobs that were not queried.
        is_answer: True if the scheduler answered. Otherwise the state of jobs without a report is unknown.
        problem: the reason for a missing answer, in the scheduler's words; empty if the scheduler answered.
    """

    reports: Mapping[str, JobReport] = field(default_factory=dict)
    is_answer: bool = True
    problem: str = ""


def read_queue(
    backend: QueueBackend, job_ids: Sequence[str], transport: Transport, retries: RetryPolicy = DEFAULT_RETRIES
) -> QueueAnswer:
    """Query the queue about jobs: one call, retried only after transient failures."""
    if not job_ids:
        return QueueAnswer()
    return _ask(backend, backend.status_argv(job_ids), backend.parse_status, transport, retries)


def read_accounting(
    backend: QueueBackend, job_ids: Sequence[str], transport: Transport, retries: RetryPolicy = DEFAULT_RETRIES
) -> QueueAnswer:
    """Query the accounting about jobs that left the queue: one call, retried as in ``read_queue``."""
    if not job_ids:
        return QueueAnswer()
    argv = backend.accounting_argv(job_ids)
    if argv is None:
        return QueueAnswer(is_answer=False, problem="this scheduler has no accounting")
    return _ask(backend, argv, backend.parse_accounting, transport, retries)


def find_job(
    backend: QueueBackend,
    job_name: str,
    transport: Transport,
    retries: RetryPolicy = DEFAULT_RETRIES,
    *,
    known_ids: Collection[str] = (),
) -> tuple[JobReport | None, QueueAnswer]:
    """Find the newest queued job of this name, for a submission whose answer was lost.

    Also returns the answer: a job of None means "no such job" only if ``is_answer`` is true.

    Args:
        backend: the scheduler's backend.
        job_name: as returned by the backend's ``job_name``.
        transport: the machine where its commands run.
        retries: after transient failures.
        known_ids: jobs to ignore: those of the run's earlier submissions have the same name.
    """
    answer = _ask(backend, backend.find_argv(job_name), backend.parse_status, transport, retries)
    named = [report for report in answer.reports.values() if report.name == job_name and report.job_id not in known_ids]
    living = [report for report in named if not report.state.is_finished]
    return max(living or named, key=lambda report: _number(report.job_id), default=None), answer


def _number(job_id: str) -> int:
    """Leading number of a job id, which increases: 1234 of ``1234.server``; -1 without a leading number."""
    match = re.match(r"\d+", job_id)
    return int(match[0]) if match is not None else -1


def run_with_retries(
    backend: QueueBackend, argv: Sequence[str], transport: Transport, retries: RetryPolicy = DEFAULT_RETRIES
) -> CommandResult:
    """Run a scheduler's command, with retries after transient failures.

    Raises:
        SchedulerError: the command cannot be started, or did not end.
    """
    begun = time.monotonic()
    for pause_s in (*retries.pauses_s, None):
        try:
            result: CommandResult | SchedulerError = transport.run(argv, timeout_s=TIMEOUT_S)
        except ProgramMissing:
            raise absent_command(argv, transport) from None
        except SchedulerError as error:
            result = error
        if isinstance(result, SchedulerError):
            may_pass = result.transient
        else:
            may_pass = result.exit_status != 0 and backend.is_transient(result.exit_status, result.stderr)
        if pause_s is None or not may_pass or time.monotonic() - begun > LONGEST_RETRIED_S:
            break
        retries.sleep(pause_s)
    if isinstance(result, SchedulerError):
        raise result
    if is_absent(result):
        raise absent_command(argv, transport)
    return result


def is_absent(result: CommandResult) -> bool:
    """True if a shell did not find the command: some commands start in a shell, for their environment."""
    return result.exit_status == NOT_FOUND and "not found" in result.stderr


def absent_command(argv: Sequence[str], transport: Transport) -> ProgramMissing:
    """Error for a scheduler's command that its machine does not have: says where to run llmctl."""
    return ProgramMissing(
        f"{program_of(argv)}: is not installed on {transport.host}, or not in PATH: run llmctl on a login node of the "
        "cluster, name one as login.host in the cluster's profile, or choose another cluster (llmctl clusters list)",
        transient=False,
        argv=argv,
    )


def last_line(result: CommandResult) -> str:
    """The last line of a failed command's output."""
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {result.exit_status}, without output"


def _ask(
    backend: QueueBackend,
    argv: Sequence[str],
    parse: Callable[[str], dict[str, JobReport]],
    transport: Transport,
    retries: RetryPolicy,
) -> QueueAnswer:
    try:
        result = run_with_retries(backend, argv, transport, retries)
    except SchedulerError as error:
        return QueueAnswer(is_answer=False, problem=error.message)
    if result.exit_status == 0 or backend.is_answer(result.exit_status, result.stderr):
        return QueueAnswer(parse(result.stdout))
    advice = backend.advice(result.stderr)
    # The reports in a partial answer are valid all the same.
    problem = last_line(result) + (f"; {advice}" if advice else "")
    return QueueAnswer(parse(result.stdout), is_answer=False, problem=problem)
