"""Asking a scheduler about jobs: its queue, its accounting, and whether there is a job of a name.

A scheduler that is restarting or overloaded is asked again, a few times and not for long. What does not answer then is
told apart from an answer that holds nothing: only the second says that a job is not there.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llmctl.backends.base import JobReport, QueueBackend
from llmctl.errors import SchedulerError
from llmctl.transport.protocol import CommandResult, Transport

TIMEOUT_S = 90.0
"""Above the minute for which Slurm's clients themselves try to reach a controller whose configuration is wrong."""
PATIENCE_S = 8.0
"""Clients that have tried for this long by themselves are not asked again (Slurm's do for MessageTimeout, 10 s)."""
INTERVAL_S = 40.0
"""Between two questions of whoever looks again and again: at most two in any minute, for a scheduler that many ask."""


@dataclass(frozen=True)
class Patience:
    """How often a command that failed for the moment is run again.

    Attributes:
        pauses_s: between one try and the next; none for those who look again and again anyway.
        sleep: waits.
    """

    pauses_s: tuple[float, ...] = (1.0, 3.0)
    sleep: Callable[[float], None] = time.sleep


PATIENT = Patience()


@dataclass(frozen=True)
class QueueAnswer:
    """What one question brought.

    Attributes:
        reports: by job id; also of jobs that were not asked about.
        is_answer: whether the scheduler has answered. Otherwise nothing is known of jobs that have no report.
        problem: why not, in the scheduler's words; empty if it has answered.
    """

    reports: Mapping[str, JobReport] = field(default_factory=dict)
    is_answer: bool = True
    problem: str = ""


def read_queue(
    backend: QueueBackend, job_ids: Sequence[str], transport: Transport, patience: Patience = PATIENT
) -> QueueAnswer:
    """What the queue says of jobs: one call, and again only where that failed for the moment."""
    if not job_ids:
        return QueueAnswer()
    return _ask(backend, backend.status_argv(job_ids), backend.parse_status, transport, patience)


def read_accounting(
    backend: QueueBackend, job_ids: Sequence[str], transport: Transport, patience: Patience = PATIENT
) -> QueueAnswer:
    """What the accounting says of jobs that have left the queue: one call, as ``read_queue``."""
    if not job_ids:
        return QueueAnswer()
    argv = backend.accounting_argv(job_ids)
    if argv is None:
        return QueueAnswer(is_answer=False, problem="this scheduler keeps none")
    return _ask(backend, argv, backend.parse_accounting, transport, patience)


def find_job(
    backend: QueueBackend,
    job_name: str,
    transport: Transport,
    patience: Patience = PATIENT,
    *,
    known_ids: Collection[str] = (),
) -> tuple[JobReport | None, QueueAnswer]:
    """The job of this name that is in the queue, for a submission whose answer was lost; the newest of several.

    The answer is handed back as well: None says that there is no such job only if it ``is_answer``.

    Args:
        backend: of the scheduler.
        job_name: as ``job_name`` of the backend gave it.
        transport: the machine where its commands are run.
        patience: with a scheduler that fails for the moment.
        known_ids: jobs that are not meant: those of earlier submissions of the run have the same name.
    """
    answer = _ask(backend, backend.find_argv(job_name), backend.parse_status, transport, patience)
    named = [report for report in answer.reports.values() if report.name == job_name and report.job_id not in known_ids]
    living = [report for report in named if not report.state.is_finished]
    return max(living or named, key=lambda report: _number(report.job_id), default=None), answer


def _number(job_id: str) -> int:
    """What a job id begins with, which counts up: 1234 of ``1234.server``; -1 where it begins with no number."""
    match = re.match(r"\d+", job_id)
    return int(match[0]) if match is not None else -1


def run_patiently(
    backend: QueueBackend, argv: Sequence[str], transport: Transport, patience: Patience = PATIENT
) -> CommandResult:
    """Run a scheduler's command, and run it again a few times where it failed for the moment.

    Raises:
        SchedulerError: it cannot be started, or did not come to an end.
    """
    begun = time.monotonic()
    for pause_s in (*patience.pauses_s, None):
        try:
            result: CommandResult | SchedulerError = transport.run(argv, timeout_s=TIMEOUT_S)
        except SchedulerError as error:
            result = error
        if isinstance(result, SchedulerError):
            may_pass = result.transient
        else:
            may_pass = result.exit_status != 0 and backend.is_transient(result.exit_status, result.stderr)
        if pause_s is None or not may_pass or time.monotonic() - begun > PATIENCE_S:
            break
        patience.sleep(pause_s)
    if isinstance(result, SchedulerError):
        raise result
    return result


def said(result: CommandResult) -> str:
    """The last thing that a failed command said, on one line."""
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {result.exit_status}, without a word"


def _ask(
    backend: QueueBackend,
    argv: Sequence[str],
    parse: Callable[[str], dict[str, JobReport]],
    transport: Transport,
    patience: Patience,
) -> QueueAnswer:
    try:
        result = run_patiently(backend, argv, transport, patience)
    except SchedulerError as error:
        return QueueAnswer(is_answer=False, problem=error.message)
    if result.exit_status == 0 or backend.is_answer(result.exit_status, result.stderr):
        return QueueAnswer(parse(result.stdout))
    advice = backend.advice(result.stderr)
    # What it has said of some jobs is true all the same.
    problem = said(result) + (f"; {advice}" if advice else "")
    return QueueAnswer(parse(result.stdout), is_answer=False, problem=problem)
