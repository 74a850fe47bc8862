"""The state of a run, decided from observed facts alone. Pure.

Order of trust: exit.json, which the supervisor writes once everything of the attempt has ended; then the job itself
(the scheduler's report, or the process on this machine); then the age of the heartbeats. Doubt gives ``unknown`` with
the reason for the doubt, never an ending. One exit.json is not final: that of a job which its scheduler stopped and may
start again.
"""

from dataclasses import dataclass, replace
from typing import Literal

from llmctl.backends.base import JobReport
from llmctl.durations import duration_text
from llmctl.job_state import JobState
from llmctl.runs.facts import AttemptFacts, Ending, first_error
from llmctl.runs.failures.remedies import REMEDIES
from llmctl.runs.hang import build_progress, hang_at_end, lagging_ranks, name_ranks
from llmctl.runs.links import WaitingJob

FRESH_S = 60.0
"""A heartbeat is written about once per second; a younger one is a sign of life even over a slow NFS."""
SUBMITTING_S = 60.0
"""A submission without a job id may still be in progress for this long."""
SCHEDULERS_DOING = (JobState.TIMEOUT, JobState.PREEMPTED, JobState.NODE_FAIL)
"""Endings caused by the scheduler or the hardware: the run can resume from its latest checkpoint."""


@dataclass(frozen=True)
class JobAnswer:
    """The known state of the submission's job, with the words for it.

    Attributes:
        state: running or pending; a finished state if the job has certainly ended; unknown if undecidable.
        raw: the scheduler's words or, for a process, the finding.
        survivors: number of the run's processes that outlived its job.sh.
        source: origin of the answer; ``memory``: the run was seen as ended earlier, and there is no newer answer.
        report: the scheduler's report, if there is one.
        is_silent: the scheduler does not answer.
        has_left: the queue no longer knows the job.
    """

    state: JobState
    raw: str
    survivors: int = 0
    source: Literal["process", "queue", "accounting", "memory"] = "process"
    report: JobReport | None = None
    is_silent: bool = False
    has_left: bool = False


@dataclass(frozen=True)
class RunFacts:
    """All facts that decide a run's state. Times in seconds since 1970.

    Attributes:
        run_id: the run's id, for the remedies in messages.
        job: the last submission's job; None if none was recorded.
        submitted: time of the last submission, or of the record without a submission.
        cancel_requested: time of ``llmctl cancel``, if requested for this submission.
        attempt: the last attempt of the last submission; None before the first.
        attempts: number of attempts of all submissions.
        attempts_of_submission: number of attempts of the last submission.
        waiting: the next job of a chain of jobs, if it has made no attempt yet.
        last_words: last line of job.log, for a job that ended before its first attempt.
        now: the time of observation.
        iteration_time_s: present seconds per iteration; None if unknown.
    """

    run_id: str
    job: JobAnswer | None
    submitted: float
    cancel_requested: float | None
    attempt: AttemptFacts | None
    now: float
    iteration_time_s: float | None = None
    attempts: int = 0
    attempts_of_submission: int = 0
    last_words: str = ""
    waiting: WaitingJob | None = None


@dataclass(frozen=True)
class Verdict:
    """The state, its reason as a sentence, job.sh's exit code, and the attempt's end."""

    state: JobState
    detail: str
    exit_code: int | None = None
    ended: float | None = None


def decide(facts: RunFacts) -> Verdict:
    """Decide the state of a run."""
    if facts.waiting is not None:
        return _between_jobs(facts, facts.waiting, facts.job)
    if facts.attempt is not None and facts.attempt.ending is not None:
        if facts.attempt.ending.restarts:
            return _between_attempts(facts, facts.attempt, facts.attempt.ending)
        if facts.attempt.ending.passes_on:
            return _handing_over(facts, _by_exit_file(facts, facts.attempt, facts.attempt.ending), facts.job)
        verdict = _by_exit_file(facts, facts.attempt, facts.attempt.ending)
        is_last_word = facts.attempt.ending.is_final or facts.cancel_requested is not None
        if is_last_word or facts.job is None or facts.job.source == "process":
            return verdict
        return _stopped_by_scheduler(facts, verdict, facts.job)
    if facts.job is None:
        return _without_job(facts)
    if facts.job.state in (JobState.RUNNING, JobState.PENDING):
        return _living(facts, facts.job)
    if facts.job.state is JobState.UNKNOWN:
        return _doubtful(facts, facts.job)
    return _ended_without_exit_file(facts, facts.job)


def failure_cause(attempt: AttemptFacts, run_id: str) -> str:
    """The first failing rank with host and cause, or other facts of a failure."""
    error = first_error(attempt.errors)
    cause = attempt.ending.cause if attempt.ending is not None else ""
    if error is not None:
        # A rank that blames a peer does not know why the peer is gone; the supervisor may know.
        known = cause if error.is_about_a_peer else ""
        return "; ".join(part for part in (known, _silent_ranks(attempt), error.summary()) if part)
    output = _output_words(attempt.ending, run_id)
    if len(attempt.heartbeats) == 1 and attempt.ending is not None and attempt.ending.output_kind == "killed":
        # The one rank: torchrun's line on its process knows neither its name nor what it did.
        output = _silent_ranks(attempt)
    if cause or output:
        return "; ".join(part for part in (cause, output) if part)
    code = attempt.ending.code if attempt.ending is not None else None
    silence = "; no rank wrote an error report" if attempt.heartbeats else ""
    if code is not None and 128 < code < 160 and attempt.ending is not None and attempt.ending.signal:
        return f"did not end in time after SIG{attempt.ending.signal} and was killed (exit code {code})"
    if code is not None and 128 < code < 160:
        return f"ended by signal {code - 128} (exit code {code}){silence}"
    return f"ended with exit code {code}{silence}" if code is not None else f"failed{silence}"


def _output_words(ending: Ending | None, run_id: str) -> str:
    """The cause that the run's output tells, with what helps; empty without one."""
    remedy = REMEDIES.get(ending.output_kind) if ending is not None else None
    if ending is None or remedy is None:
        return ""
    return f"{remedy.title}: {ending.output_line}; {remedy.advice.replace('RUN', run_id)}"


def _by_exit_file(facts: RunFacts, attempt: AttemptFacts, ending: Ending) -> Verdict:
    iteration = attempt.outcome.iteration if attempt.outcome is not None else None
    at = f" at iteration {iteration}" if iteration is not None else ""
    if ending.reason == "completed":
        return Verdict(JobState.COMPLETED, at and f"completed{at}", ending.code, ending.time)
    if ending.reason == "cancelled" or facts.cancel_requested is not None:
        # A cancel may precede job.sh's first attempt directory; the record holds the request.
        return Verdict(JobState.CANCELLED, _cancelled_detail(attempt), ending.code, ending.time)
    if ending.reason == "timeout":
        saved = f", saved{at}" if attempt.outcome is not None else _hang_before(facts, attempt, ending.time)
        detail = f"reached its time limit{saved}; llmctl resume {facts.run_id} continues{_chain_end(ending)}"
        return Verdict(JobState.TIMEOUT, detail, ending.code, ending.time)
    if ending.reason == "stopped":
        # Only the trainer saves; a stopped COMMAND leaves no outcome.
        what = f"stopped{at}, saved" if attempt.outcome is not None else "stopped"
        detail = f"{what}; llmctl resume {facts.run_id} continues"
        return Verdict(JobState.CANCELLED, detail, ending.code, ending.time)
    if ending.reason == "failed":
        # A job that another's signal ends, such as an administrator's, may have hung before, and one whose ranks have
        # waited for the timeout of their collectives has.
        lost_peers = all(error.is_about_a_peer for error in attempt.errors)
        may_have_hung = (ending.signal or attempt.errors) and lost_peers
        hang = _hang_before(facts, attempt, ending.time) if may_have_hung else ""
        last = f"; not started again: {ending.not_restarted}" if ending.not_restarted else ""
        last += _chain_end(ending)
        return Verdict(JobState.FAILED, failure_cause(attempt, facts.run_id) + hang + last, ending.code, ending.time)
    return Verdict(JobState.UNKNOWN, f"exit.json says {ending.reason!r}", ending.code, ending.time)


def _chain_end(ending: Ending) -> str:
    return f"; the chain of jobs has ended: {ending.not_chained}" if ending.not_chained else ""


def _hang_before(facts: RunFacts, attempt: AttemptFacts, end: float | None) -> str:
    """The hang that an end by the scheduler would hide, from the heartbeats as they were at that time."""
    hang = hang_at_end(attempt.heartbeats, end, facts.iteration_time_s) if end is not None else ""
    return f", after {hang}" if hang else ""


def _between_attempts(facts: RunFacts, attempt: AttemptFacts, ending: Ending) -> Verdict:
    """The verdict while the same job prepares the next attempt, or if it ends before that."""
    job, failed = facts.job, _by_exit_file(facts, attempt, ending)
    if job is not None and job.state in (JobState.RUNNING, JobState.PENDING):
        most = f" of at most {ending.most_attempts}" if ending.most_attempts is not None else ""
        again = Verdict(JobState.RUNNING, f"starting again (attempt {attempt.number + 1}{most}): {failed.detail}")
        return again if job.state is JobState.RUNNING and facts.cancel_requested is None else _living(facts, job)
    if job is not None and (job.is_silent or (job.state is JobState.UNKNOWN and not job.has_left)):
        return Verdict(JobState.UNKNOWN, f"{job.raw}; was to start again after: {failed.detail}")
    if failed.state is not JobState.FAILED:
        return failed
    state = job.state if job is not None and job.state in SCHEDULERS_DOING else failed.state
    how = f" ({job.raw})" if job is not None and job.raw else ""
    return replace(failed, state=state, detail=f"{failed.detail}; the job ended before it could start again{how}")


def _handing_over(facts: RunFacts, verdict: Verdict, job: JobAnswer | None) -> Verdict:
    """The verdict while a job submits the run's next one, or if it was killed before the answer came."""
    if verdict.state is JobState.CANCELLED:
        return verdict
    if job is not None and job.state in (JobState.RUNNING, JobState.PENDING):
        return Verdict(JobState.RUNNING, f"submitting the next job of the chain ({_without_advice(verdict)})")
    if job is not None and job.is_silent:
        return Verdict(JobState.UNKNOWN, f"{_without_advice(verdict)}; {job.raw}")
    detail = f"{_without_advice(verdict)}; the job ended before it could submit the next one"
    return replace(verdict, detail=f"{detail}; llmctl resume {facts.run_id} continues")


def _between_jobs(facts: RunFacts, waiting: WaitingJob, job: JobAnswer | None) -> Verdict:
    """The verdict while the next job of a chain has made no attempt."""
    if job is None or job.is_silent:
        return Verdict(JobState.UNKNOWN, f"{waiting}: {job.raw if job is not None else 'being submitted'}")
    if job.state in (JobState.RUNNING, JobState.PENDING):
        if facts.cancel_requested is not None:
            return _living(facts, job)
        raw = f": {job.raw}" if job.raw else ""
        words = f"{waiting}, pending{raw}" if job.state is JobState.PENDING else f"starting ({waiting})"
        return Verdict(job.state, words)
    if facts.cancel_requested is not None:
        return Verdict(JobState.CANCELLED, f"cancelled before {waiting}, began")
    if job.state in (JobState.UNKNOWN, JobState.COMPLETED):
        return Verdict(JobState.UNKNOWN, f"{waiting}, made no attempt: {job.raw}")
    detail = f"{waiting}, ended before it made an attempt: {job.raw}; llmctl resume {facts.run_id} continues"
    return Verdict(job.state, detail)


def _stopped_by_scheduler(facts: RunFacts, verdict: Verdict, job: JobAnswer) -> Verdict:
    """The verdict after an orderly stop by another's signal. The scheduler may restart the job."""
    if job.state is JobState.PENDING:
        return Verdict(job.state, f"{job.raw}; the scheduler has stopped it ({_without_advice(verdict)})")
    if job.state is JobState.RUNNING:
        return Verdict(job.state, "starting again" if _is_between_attempts(facts, job) else "ending")
    if job.is_silent or (job.state is JobState.UNKNOWN and not job.has_left):
        doubt = f"whether the scheduler starts it again is not known: {job.raw}"
        return Verdict(JobState.UNKNOWN, f"{_without_advice(verdict)}; {doubt}")
    if job.state in SCHEDULERS_DOING:
        return replace(verdict, state=job.state, detail=f"{job.raw}; {verdict.detail}")
    return verdict


def _without_advice(verdict: Verdict) -> str:
    return verdict.detail.partition("; llmctl resume ")[0]


def _is_between_attempts(facts: RunFacts, job: JobAnswer) -> bool:
    """True if the scheduler counts more starts than job.sh has begun attempts."""
    restarts = job.report.restarts if job.report is not None else None
    return bool(restarts) and facts.attempts_of_submission <= (restarts or 0)


def _cancelled_detail(attempt: AttemptFacts) -> str:
    outcome = attempt.outcome
    if outcome is not None and outcome.reason == "stopped":
        return f"cancelled; saved at iteration {outcome.iteration}"
    if outcome is not None:
        return f"cancelled after it had {outcome.reason} at iteration {outcome.iteration}"
    return "cancelled"


def _without_job(facts: RunFacts) -> Verdict:
    if facts.now - facts.submitted < SUBMITTING_S:
        return Verdict(JobState.PENDING, "being submitted")
    return Verdict(JobState.UNKNOWN, "no job id was recorded: submit was interrupted")


def _living(facts: RunFacts, job: JobAnswer) -> Verdict:
    if facts.cancel_requested is not None:
        return Verdict(job.state, f"cancel requested {duration_text(facts.now - facts.cancel_requested)} ago")
    if job.state is JobState.PENDING:
        return Verdict(job.state, job.raw)
    newest = facts.attempt.newest_heartbeat if facts.attempt is not None else None
    is_silent = newest is None or _read_at(facts) - newest.time > FRESH_S
    if facts.attempt is None:
        return Verdict(job.state, "starting")
    if is_silent and _is_between_attempts(facts, job):
        return Verdict(job.state, "starting again")
    error = first_error(facts.attempt.errors)
    if error is not None:
        return Verdict(job.state, f"ending: {error.summary()}")
    lag = lagging_ranks(facts.attempt.heartbeats, _read_at(facts), facts.iteration_time_s)
    return Verdict(job.state, lag or build_progress(facts.attempt.heartbeats))


def _read_at(facts: RunFacts) -> float:
    """The time of the heartbeat read. The age of the read itself says nothing about the ranks."""
    return facts.now - (facts.attempt.heartbeats_age_s if facts.attempt is not None else 0.0)


def _doubtful(facts: RunFacts, job: JobAnswer) -> Verdict:
    newest = facts.attempt.newest_heartbeat if facts.attempt is not None else None
    age = facts.now - newest.time if newest is not None else None
    if newest is not None and age is not None and _read_at(facts) - newest.time <= FRESH_S:
        return Verdict(JobState.RUNNING, f"heartbeat {duration_text(age)} ago; {job.raw}")
    if job.has_left and facts.cancel_requested is not None:
        # A job that never ran leaves no exit.json, and no entry in some accountings.
        how = "cancelled before it began" if facts.attempt is None else f"cancelled; {job.raw}"
        return Verdict(JobState.CANCELLED, how)
    if age is None or facts.attempt is None:
        return Verdict(JobState.UNKNOWN, job.raw)
    hang = _hang_before(facts, facts.attempt, facts.attempt.alive) if job.has_left else ""
    return Verdict(JobState.UNKNOWN, f"{job.raw}{hang}; last heartbeat {duration_text(age)} ago")


def _ended_without_exit_file(facts: RunFacts, job: JobAnswer) -> Verdict:
    attempt = facts.attempt
    # The supervisor was killed: its last sign of life is the only date of the end that all schedulers have.
    hang = _hang_before(facts, attempt, attempt.alive) if attempt is not None and attempt.outcome is None else ""
    if job.source == "memory":
        return Verdict(job.state, job.raw + hang)
    if job.survivors:
        detail = f"{job.raw}, but {job.survivors} of its processes still run; llmctl cancel {facts.run_id} ends them"
        return Verdict(JobState.RUNNING, detail)
    if attempt is not None and attempt.outcome is not None:
        return _by_outcome(facts, attempt, job)
    newest = attempt.newest_heartbeat if attempt is not None else None
    ended = newest.time if newest is not None else None
    code = job.report.exit_code if job.report is not None else None
    if job.state is JobState.COMPLETED:
        return Verdict(job.state, f"{job.raw}; there is no exit.json", code, ended)
    if facts.cancel_requested is not None or (attempt is not None and attempt.cancel_marked):
        return Verdict(JobState.CANCELLED, _cancelled_by_force(attempt, job), code, ended)
    if attempt is None:
        words = f"; last line of job.log: {facts.last_words}" if facts.last_words else ""
        return Verdict(job.state, f"{job.raw} before it made an attempt{words}{_advice(facts, job)}", code)
    heard = f"; last heartbeat {duration_text(facts.now - ended)} ago" if ended is not None else "; no heartbeat"
    error = first_error(attempt.errors)
    # Ranks that lose a rank as it is killed tell nothing beside its hang.
    cause = f"; {error.summary()}" if error is not None and not (hang and error.is_about_a_peer) else ""
    advice = _advice(facts, job) if job.state in SCHEDULERS_DOING else ""
    return Verdict(job.state, f"{job.raw} before exit.json could be written{hang or heard}{cause}{advice}", code, ended)


def _cancelled_by_force(attempt: AttemptFacts | None, job: JobAnswer) -> str:
    if attempt is None and job.source != "process":
        return "cancelled before it began"
    return "cancelled; job.sh ended before exit.json could be written"


def _advice(facts: RunFacts, job: JobAnswer) -> str:
    if job.state in SCHEDULERS_DOING and facts.attempt is not None:
        return f"; llmctl resume {facts.run_id} continues from the latest checkpoint"
    return f"; see llmctl logs {facts.run_id} --job"


def _by_outcome(facts: RunFacts, attempt: AttemptFacts, job: JobAnswer) -> Verdict:
    outcome = attempt.outcome
    assert outcome is not None
    said = f"{outcome.reason} at iteration {outcome.iteration} according to the trainer"
    where = f"{said}; {job.raw} before exit.json could be written"
    if outcome.reason == "completed":
        return Verdict(JobState.COMPLETED, where, ended=outcome.time)
    is_asked = facts.cancel_requested is not None or attempt.cancel_marked
    # The scheduler ends the ranks of a supervisor that was killed, and they save first.
    is_failure = job.report is not None and job.state is JobState.FAILED and not is_asked
    state = job.state if is_failure or job.state in SCHEDULERS_DOING else JobState.CANCELLED
    return Verdict(state, f"{where}; llmctl resume {facts.run_id} continues", ended=outcome.time)


def _silent_ranks(attempt: AttemptFacts) -> str:
    """Ranks without an error, if all errors are peer failures. One of them may be the cause."""
    if not all(error.is_about_a_peer for error in attempt.errors):
        return ""
    spoke = {error.rank for error in attempt.errors}
    silent = [heartbeat for heartbeat in attempt.heartbeats if heartbeat.rank not in spoke]
    if not silent:
        return ""
    return f"{name_ranks(silent, limit=2)} ended without an error report (killed, or out of memory?)"
