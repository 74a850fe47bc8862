"""Job states, from a scheduler's queue and accounting or from the process table.

One query covers all runs of a cluster, at most once per ``interval_s``. A job missing from an answer has not
ended for that reason: only the accounting can report an ending.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llmctl.backends.base import JobReport, QueueBackend
from llmctl.durations import duration_text
from llmctl.job_state import JobState
from llmctl.runs.attempts import RunAttempts
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import DEFAULT_RETRIES, QueueAnswer, RetryPolicy, find_job, read_accounting, read_queue
from llmctl.runs.state import SUBMITTING_S, JobAnswer
from llmctl.transport.protocol import Transport

RECENTLY_S = 600.0
"""Longest delay of an accounting: entries are written in batches, and the database may be away for minutes."""


@dataclass(frozen=True)
class JobQuestion:
    """Query for one run's job: job ids of its last submission, newest known attempt."""

    record: RunRecord
    job_ids: tuple[str, ...]
    attempt: int | None


def question_of(record: RunRecord, attempts: RunAttempts, backend: QueueBackend) -> JobQuestion:
    """Build the query for a run. Uses started.json if submit was cut off before recording the jobs.

    Of a chain of jobs, it is about the newest one: that of the newest attempt, or the next one, which still waits.
    """
    started = attempts.newest.started if attempts.newest is not None else None
    ids = tuple(job.job_id for job in record.submissions[-1].jobs) if record.submissions else ()
    if started is not None and started.job_id and (not ids or started.link > 1):
        ids = (started.job_id,)
    if attempts.waiting is not None:
        job_id = attempts.waiting.job_id(backend)
        ids = (job_id,) if job_id else ()
    return JobQuestion(record, ids, attempts.newest.number if attempts.newest is not None else None)


class SchedulerWatch:
    """A scheduler's answers about one cluster's jobs, over one observation or many."""

    def __init__(
        self,
        backend: QueueBackend,
        transport: Transport,
        *,
        interval_s: float = 0.0,
        remembered: Mapping[str, tuple[JobState, float]] | None = None,
        asks_again: bool = False,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        """Query ``backend``'s commands through ``transport``.

        Args:
            backend: the scheduler's backend.
            transport: the machine where its commands run.
            interval_s: shortest time between two calls; in between, the last answer is used.
            remembered: runs already seen as ended: run id -> state, time of observation. Such a run is not queried
                unless the user has submitted it again since.
            asks_again: query ``remembered`` runs too, and use the memory only if there is no better answer.
            retries: after transient failures; repeated observation needs none.
        """
        self.backend = backend
        self._transport = transport
        self._interval_s = interval_s
        self._remembered = dict(remembered or {})
        self._asks_again = asks_again
        self._retries = retries if not interval_s else replace(retries, pauses_s=())
        self._queue = _LastAnswer()
        self._accounting = _LastAnswer()
        self._attempts: dict[str, int | None] = {}
        self._found: dict[str, tuple[float, JobAnswer | None]] = {}

    def ask_queue(self, questions: Sequence[JobQuestion]) -> list[JobAnswer | None]:
        """State of each job in the queue: one call for all; None for runs without a known job."""
        asked = [question for question in questions if self._asks_again or self._memory(question) is None]
        lost = [question for question in asked if not question.job_ids]
        ids = [job_id for question in asked for job_id in question.job_ids]
        if self._queue.is_due(ids, self._interval_s):
            self._queue.keep(read_queue(self.backend, ids, self._transport, self._retries), ids)
            self._attempts = {question.record.run_id: question.attempt for question in asked}
        found = {question.record.run_id: self._find(question) for question in lost}
        return [self._resolved(question, self._memory(question), found) for question in questions]

    def ask_accounting(self, questions: Sequence[JobQuestion], signs_of_life: Sequence[float]) -> list[JobAnswer]:
        """State of jobs that have left the queue, from the accounting: one call for all.

        Args:
            questions: the runs.
            signs_of_life: time of each run's last sign of life, in seconds since 1970.
        """
        ids = [job_id for question in questions for job_id in question.job_ids]
        if ids and self._accounting.is_due(ids, self._interval_s):
            self._accounting.keep(read_accounting(self.backend, ids, self._transport, self._retries), ids)
        answers = []
        for question, sign in zip(questions, signs_of_life, strict=True):
            answer = self._by_accounting(question, self._accounting.answer, self._transport.now() - sign)
            answers.append(answer if answer.state.is_finished else self._memory(question) or answer)
        return answers

    def _resolved(
        self, question: JobQuestion, memory: JobAnswer | None, found: Mapping[str, JobAnswer | None]
    ) -> JobAnswer | None:
        if memory is not None and not self._asks_again:
            return memory
        if not question.job_ids:
            return found[question.record.run_id]
        answer = self._by_queue(question, self._queue.answer)
        if answer.is_silent and memory is not None:
            return replace(memory, raw=f"{memory.raw} ({answer.raw})")
        return answer

    def _memory(self, question: JobQuestion) -> JobAnswer | None:
        state, seen = self._remembered.get(question.record.run_id, (None, 0.0))
        submissions = question.record.submissions
        if state is None:
            return None
        # ``seen`` is by this machine's clock, ``submitted`` by the cluster's.
        age = time.time() - seen
        if submissions and self._transport.now() - submissions[-1].time < age:
            return None
        return JobAnswer(state, f"{state} when last seen {duration_text(age)} ago", source="memory")

    def _by_queue(self, question: JobQuestion, answer: QueueAnswer) -> JobAnswer:
        if not answer.is_answer:
            return JobAnswer(
                JobState.UNKNOWN, f"the scheduler does not answer: {answer.problem}", source="queue", is_silent=True
            )
        report = self._own(question, answer)
        if report is None:
            return JobAnswer(JobState.UNKNOWN, "the job has left the queue", source="queue", has_left=True)
        began = self._attempts.get(question.record.run_id, question.attempt)
        if report.state is JobState.PENDING and question.attempt != began:
            return JobAnswer(JobState.RUNNING, "the job began after the queue query", source="queue")
        return JobAnswer(report.state, _words(question, report), source="queue", report=report)

    def _by_accounting(self, question: JobQuestion, answer: QueueAnswer, silent_s: float) -> JobAnswer:
        report = self._own(question, answer)
        if report is not None and report.state.is_finished:
            return JobAnswer(report.state, _words(question, report), source="accounting", report=report, has_left=True)
        if not answer.is_answer:
            words = f"the job has left the queue, and the accounting does not answer: {answer.problem}"
        elif report is not None:
            words = f"the job has left the queue; the accounting still reports it as {report.raw}"
        elif silent_s < RECENTLY_S:
            words = "the job has left the queue; the accounting has no entry yet"
        else:
            words = "the job has left the queue, and the accounting has no entry"
        return JobAnswer(JobState.UNKNOWN, words, source="accounting", has_left=True)

    def _own(self, question: JobQuestion, answer: QueueAnswer) -> JobReport | None:
        """The report of the run's own job. Another job name means a later job with the same, reused id."""
        name = self.backend.job_name(question.record.run_id)
        reports = [answer.reports[job_id] for job_id in question.job_ids if job_id in answer.reports]
        return next((report for report in reports if report.name in (None, name)), None)

    def _find(self, question: JobQuestion) -> JobAnswer | None:
        """Find the job of a submission without a job id. Submit was cut off, or its answer was lost."""
        submissions = question.record.submissions
        if not submissions or self._transport.now() - submissions[-1].time < SUBMITTING_S:
            return None
        name = self.backend.job_name(question.record.run_id)
        when, known = self._found.get(name, (None, None))
        if when is None or time.monotonic() - when >= self._interval_s:
            earlier = {job.job_id for submission in submissions[:-1] for job in submission.jobs}
            known = self._by_name(name, earlier)
            self._found[name] = (time.monotonic(), known)
        return known

    def _by_name(self, name: str, earlier: Collection[str]) -> JobAnswer:
        report, answer = find_job(self.backend, name, self._transport, self._retries, known_ids=earlier)
        if report is not None:
            return JobAnswer(report.state, words_of(report), source="queue", report=report)
        if not answer.is_answer:
            words = f"no job id was recorded, and the scheduler does not answer: {answer.problem}"
            return JobAnswer(JobState.UNKNOWN, words, source="queue", is_silent=True)
        words = f"no job id was recorded: submit was interrupted; the queue has no job named {name}"
        return JobAnswer(JobState.UNKNOWN, words, source="queue", has_left=True)


def _words(question: JobQuestion, report: JobReport) -> str:
    submissions = question.record.submissions
    return words_of(report, by_llmctl=bool(submissions) and submissions[-1].cancel_requested is not None)


class _LastAnswer:
    """The last answer, the job ids queried, and the time."""

    def __init__(self) -> None:
        self.answer = QueueAnswer()
        self._ids: frozenset[str] = frozenset()
        self._when: float | None = None

    def is_due(self, ids: Sequence[str], interval_s: float) -> bool:
        old = self._when is None or time.monotonic() - self._when >= interval_s
        return bool(ids) and (old or not self._ids.issuperset(ids))

    def keep(self, answer: QueueAnswer, ids: Sequence[str]) -> None:
        self.answer, self._ids, self._when = answer, frozenset(ids), time.monotonic()


_ENDINGS = {
    JobState.COMPLETED: "the scheduler reports success",
    JobState.FAILED: "the job failed",
    JobState.CANCELLED: "the job was cancelled, not by llmctl",
    JobState.TIMEOUT: "the scheduler ended it at its time limit",
    JobState.PREEMPTED: "preempted by another job",
    JobState.NODE_FAIL: "a node failed",
}


def words_of(report: JobReport, *, by_llmctl: bool = False) -> str:
    """A readable sentence on a job's state, with the scheduler's own word.

    Args:
        report: the scheduler's.
        by_llmctl: True if `llmctl cancel` was called for the job.
    """
    if report.state is JobState.RUNNING:
        return report.reason
    if report.state is JobState.PENDING:
        start = f"; expected to start {report.expected_start}" if report.expected_start else ""
        return (report.reason or f"waiting in the queue ({report.raw})") + start
    reason = f": {report.reason}" if report.reason else ""
    if report.state is JobState.UNKNOWN:
        return f"the scheduler says {report.raw!r}{reason}"
    code = report.exit_code
    ending = "" if not code else f", by signal {code - 128}" if 128 < code < 160 else f", with exit code {code}"
    cause = "cancelled by llmctl" if by_llmctl and report.state is JobState.CANCELLED else _ENDINGS[report.state]
    return f"{cause} ({report.raw}{reason}){ending}"
