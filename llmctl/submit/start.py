"""Handing a job over: to a scheduler, never twice, or to this machine.

A scheduler's answer can be lost after it has taken the job: the connection drops, the command is ended because it took
too long, or it prints no id. Then the queue is looked through for the job's name, which holds the run id. A job is
handed over again only where what was said proves that the scheduler has not taken it.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from llmctl.backends.base import HostCommand, QueueBackend, SubmittedJob
from llmctl.errors import SchedulerError
from llmctl.runs.scheduler_query import Patience, find_job, said
from llmctl.transport.protocol import CommandResult, Transport, program_of

TIMEOUT_S = 120.0
"""Above the minute for which Slurm's clients try to reach a controller, and what a site's filter may take."""
LOOK_PAUSES_S = (1.0, 3.0, 8.0, 20.0)
"""Before each look for a job whose answer was lost: a slow scheduler may take it long after its client has left."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0)
"""Before each further try of a submission that the scheduler could not take."""

Tell = Callable[[str], None]


class SubmissionLost(SchedulerError):
    """Nobody can tell whether the job was taken; the run keeps its directory, so that it is found if it was."""


@dataclass(frozen=True)
class QueueSubmission:
    """One job on its way into a queue.

    Attributes:
        run_id: of the run, for messages.
        run_dir: where the command is run.
        backend: of the scheduler.
        transport: the machine where its commands are run.
        known_ids: jobs of earlier submissions of the run, which have the same name.
        tell: says what is being waited for.
        sleep: waits.
    """

    run_id: str
    run_dir: str
    backend: QueueBackend
    transport: Transport
    known_ids: Collection[str]
    tell: Tell
    sleep: Callable[[float], None] = field(default=time.sleep)

    def submit(self, command: HostCommand) -> SubmittedJob:
        """The job that the scheduler has taken.

        Raises:
            SubmissionLost: nobody can tell whether it was taken.
            SchedulerError: it was not; the message holds the scheduler's own words.
        """
        for pause_s in RETRY_PAUSES_S:
            job = self._try(command)
            if isinstance(job, SubmittedJob):
                return job
            self.tell(f"{program_of(command.argv)}: {said(job)}; trying again in {pause_s:g} s")
            self.sleep(pause_s)
        job = self._try(command)
        if isinstance(job, SubmittedJob):
            return job
        raise self._refusal(command, job)

    def _try(self, command: HostCommand) -> SubmittedJob | CommandResult:
        """The job, or what was said where the scheduler could not take it for the moment, and surely has not."""
        try:
            result = self.transport.run(command.argv, timeout_s=TIMEOUT_S, cwd=self.run_dir)
        except SchedulerError as error:
            if not error.transient:
                raise  # it could not even be started
            return self._find(command, error.message)
        if result.exit_status == 0:
            try:
                return SubmittedJob(command.host, self.backend.parse_job_id(result.stdout))
            except SchedulerError as error:
                return self._find(command, error.message)
        if not self.backend.is_transient(result.exit_status, result.stderr):
            raise self._refusal(command, result)
        if not self.backend.was_not_taken(result.exit_status, result.stderr):
            return self._find(command, said(result))
        return result

    def _find(self, command: HostCommand, why: str) -> SubmittedJob:
        """The job whose answer was lost, by its name."""
        name = self.backend.job_name(self.run_id)
        self.tell(f"{program_of(command.argv)}: no job id came back: {why}\nlooking for a job called {name}")
        problem = ""
        for pause_s in LOOK_PAUSES_S:
            self.sleep(pause_s)
            patience = Patience(sleep=self.sleep)
            report, answer = find_job(self.backend, name, self.transport, patience, known_ids=self.known_ids)
            if report is not None:
                self.tell(f"found it: job {report.job_id}")
                return SubmittedJob(command.host, report.job_id)
            problem = answer.problem or f"there is no job called {name}"
        raise SubmissionLost(
            f"{self.run_id}: nobody can tell whether it was submitted: {why}; and now: {problem}\n"
            f"llmctl status {self.run_id} finds it if it was; if not, llmctl resume {self.run_id} submits it",
            transient=True,
            argv=command.argv,
        )

    def _refusal(self, command: HostCommand, result: CommandResult) -> SchedulerError:
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        words = " ".join(lines)[-600:] or said(result)
        advice = self.backend.advice(result.stderr)
        return SchedulerError(
            f"not submitted: {program_of(command.argv)}: {words}" + (f"\n{advice}" if advice else ""),
            transient=self.backend.is_transient(result.exit_status, result.stderr),
            argv=command.argv,
            exit_status=result.exit_status,
            stderr_tail=result.stderr,
        )


def start_here(commands: Sequence[HostCommand], run_dir: str, transport: Transport) -> tuple[SubmittedJob, ...]:
    """Start job.sh on this machine, where there is no scheduler.

    Raises:
        SchedulerError: it cannot be started.
    """
    started = []
    for command in commands:
        identity = transport.start_detached(command.argv, cwd=run_dir, log=f"{run_dir}/job.log")
        pid = identity.pid
        started.append(SubmittedJob(command.host, str(pid), pid, identity.start_time, identity.boot_id))
    return tuple(started)
