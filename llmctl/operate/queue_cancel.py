"""End a scheduler's job: first with time to save, then by the scheduler's command."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from llmctl.backends.base import QueueBackend
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.runs.attempts import AttemptBeginning, find_attempts
from llmctl.runs.job_status import SchedulerWatch, question_of
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import RetryPolicy, find_job, last_line, run_with_retries
from llmctl.runs.state import JobAnswer
from llmctl.transport.protocol import CommandResult, Transport, program_of

BEYOND_GRACE_S = 15.0
"""job.sh's seconds beyond the grace period: to end its agents, and for the file system to show exit.json here."""
LEAVE_S = 6.0
"""A job that has written exit.json leaves the queue by itself within this time."""
END_S = 90.0
"""After the scheduler's command: job.sh's stop, then the scheduler's KILL (Slurm's KillWait defaults to 30 s)."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses between queries of the queue; the last one repeats."""


@dataclass(frozen=True)
class QueueCancel:
    """The cancellation of one run's job.

    Attributes:
        record: the run's record.
        backend: the scheduler's backend.
        transport: the machine where the scheduler's commands run.
        grace_s: seconds to save.
        mark: writes attempts/K/cancel, which job.sh sees within a second; called before any wait.
        sleep: waits for a number of seconds.
    """

    record: RunRecord
    backend: QueueBackend
    transport: Transport
    grace_s: float
    mark: Callable[[int | None], None]
    sleep: Callable[[float], None] = field(default=time.sleep)

    def end(self) -> None:
        """End the job: first the mark, if it is running; then the scheduler's command.

        Nothing is ended unless it is known to be this run's: nothing while the scheduler does not answer, and no later
        job that got the same id.

        Raises:
            SchedulerError: the scheduler does not answer, refuses, or still has the job.
        """
        beginning = self._attempt()
        job = self._ask()
        if job is None:
            raise SchedulerError(f"{self.record.run_id} is being submitted at this moment", transient=True)
        runs = beginning is not None and not _has_ended(beginning) and job.state is not JobState.PENDING
        if job.is_silent and not runs:
            raise SchedulerError(f"{self.record.run_id}: nothing was ended: {job.raw}", transient=True)
        self.mark(beginning.number if beginning is not None and runs else None)
        has_ended = beginning is not None and runs and self._wait_for_exit_file(beginning.directory)
        if has_ended:
            job = self._wait_until_gone(LEAVE_S)
        elif runs:
            job = self._ask() or job
        if job.is_silent and not has_ended:
            raise SchedulerError(
                f"{self.record.run_id}: asked to end, but has not ended yet: {job.raw}", transient=True
            )
        if self._is_there(job):
            self._command(job, has_ended=has_ended)
        if self.record.job.get("chain"):
            self._end_next(job)

    def _end_next(self, before: JobAnswer) -> None:
        """End the next job of a chain, which the job may have submitted at this moment."""
        job = self._ask()
        known = before.report.job_id if before.report is not None else None
        if job is not None and job.report is not None and job.report.job_id != known and self._is_there(job):
            self._command(job, has_ended=False)

    def _command(self, job: JobAnswer, *, has_ended: bool) -> None:
        """Ask the scheduler to end the job, and wait until it has left the queue.

        A job that wrote exit.json has ended, although the queue may show it until a slow epilog is done.
        """
        assert job.report is not None
        job_id = job.report.job_id
        for command in self.backend.cancel_commands([job_id]):
            result = run_with_retries(self.backend, command.argv, self.transport, self._retries)
            # Most schedulers refuse to end an ended job, so the queue decides.
            if result.exit_status != 0 and self._is_there(self._ask() or job, job_id):
                raise _refusal(self.record.run_id, self.backend, command.argv, result)
        job = self._wait_until_gone(0.0 if has_ended else END_S, job_id)
        if self._is_there(job, job_id) and not has_ended:
            raw = job.report.raw if job.report is not None else job.raw
            raise SchedulerError(
                f"{self.record.run_id}: the scheduler was asked to end job {job_id} but still reports it as {raw}",
                transient=True,
            )

    def _wait_for_exit_file(self, directory: PurePosixPath) -> bool:
        deadline = time.monotonic() + self.grace_s + BEYOND_GRACE_S
        while True:
            # Listing the folder makes a network file system drop its cached "no such file".
            (names,) = self.transport.list_names([str(directory)])
            if "exit.json" in names:
                newest = self._attempt()
                if newest is None or _has_ended(newest):
                    return True
                # The job began again at this moment: the mark holds for the attempt that follows too.
                directory = newest.directory
            if time.monotonic() >= deadline:
                return False
            self.sleep(1.0 if self.transport.is_remote else 0.25)

    def _wait_until_gone(self, patience_s: float, job_id: str | None = None) -> JobAnswer:
        deadline = time.monotonic() + patience_s
        pauses = list(PAUSES_S)
        while True:
            job = self._ask()
            assert job is not None, "it was known before"
            if time.monotonic() >= deadline or not (job.is_silent or self._is_there(job, job_id)):
                return job
            self.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])

    def _attempt(self) -> AttemptBeginning | None:
        return find_attempts([self.record], self.transport)[0].newest

    def _ask(self) -> JobAnswer | None:
        # A new watch for each query: earlier answers of the queue are useless here.
        question = question_of(self.record, find_attempts([self.record], self.transport)[0], self.backend)
        return SchedulerWatch(self.backend, self.transport, retries=self._retries).ask_queue([question])[0]

    @property
    def _retries(self) -> RetryPolicy:
        return RetryPolicy(sleep=self.sleep)

    @staticmethod
    def _is_there(job: JobAnswer, job_id: str | None = None) -> bool:
        """True if the queue has the job; with an id, only if the job is not the next one of its chain."""
        is_same = job_id is None or (job.report is not None and job.report.job_id == job_id)
        return job.report is not None and is_same and not job.state.is_finished


def _has_ended(beginning: AttemptBeginning) -> bool:
    return beginning.ending is not None and not beginning.ending.restarts


def end_by_name(run_id: str, backend: QueueBackend, transport: Transport) -> str:
    """End the user's job of a run without a valid record, found by name; its id, or empty.

    Raises:
        SchedulerError: the scheduler does not answer, or refuses.
    """
    report, answer = find_job(backend, backend.job_name(run_id), transport)
    if not answer.is_answer:
        raise SchedulerError(f"{run_id}: nothing was ended: {answer.problem}", transient=True)
    if report is None or report.state.is_finished:
        return ""
    for command in backend.cancel_commands([report.job_id]):
        result = run_with_retries(backend, command.argv, transport)
        if result.exit_status != 0:
            raise _refusal(run_id, backend, command.argv, result)
    return report.job_id


def _refusal(run_id: str, backend: QueueBackend, argv: Sequence[str], result: CommandResult) -> SchedulerError:
    advice = backend.advice(result.stderr)
    return SchedulerError(
        f"{run_id}: {program_of(argv)}: {last_line(result)}" + (f"; {advice}" if advice else ""),
        transient=backend.is_transient(result.exit_status, result.stderr),
        argv=argv,
        exit_status=result.exit_status,
        stderr_tail=result.stderr,
    )
