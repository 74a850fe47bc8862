"""What ``llmctl status`` shows of one run, with the field names that ``--json`` promises."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from llmctl.job_state import JobState
from llmctl.runs.metrics import MetricsTable, number
from llmctl.runs.record import RunRecord
from llmctl.runs.state import RunFacts, decide


@dataclass(frozen=True)
class RunView:
    """One run as people and programs see it. Times in seconds since 1970, durations in seconds.

    Attributes:
        run_id: the run.
        name: what the user called it.
        cluster: name of the profile.
        state: one of the nine states.
        detail: a sentence on why; empty if there is nothing to say.
        attempt: number of the last attempt; None if there is none yet.
        nodes: how many the run was asked for.
        iteration: of the last row of metrics.
        train_iters: where the run is to end; None for a COMMAND.
        loss: lm_loss of that row.
        tokens_per_s: of that row.
        mfu: of that row, as a share of 1.
        eta_s: until train_iters at the present pace; only while it runs.
        metrics_age_s: since that row was written.
        started: start of the last attempt.
        ended: end of the last attempt.
        exit_code: of job.sh.
        job_ids: what the scheduler, or the process table, calls the jobs of all submissions.
        submission: number of the last submission; None if there is none.
        submitted: when that was.
        attempts: how many attempts all submissions have made.
        expected_start: when a pending run is expected to start, as the scheduler writes it.
        hosts: the nodes of the last attempt, the head first where that is known.
    """

    run_id: str
    name: str
    cluster: str
    state: JobState
    detail: str
    attempt: int | None
    nodes: int | None
    iteration: int | None
    train_iters: int | None
    loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    eta_s: float | None
    metrics_age_s: float | None
    started: float | None
    ended: float | None
    exit_code: int | None
    job_ids: tuple[str, ...] = ()
    submission: int | None = None
    submitted: float | None = None
    attempts: int = 0
    expected_start: str | None = None
    hosts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON has no word for (NaN, infinity) are null."""
        values = {**asdict(self), "state": str(self.state)}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def build_view(record: RunRecord, facts: RunFacts, metrics: MetricsTable) -> RunView:
    """The view of a run from its record, the observed facts and its last metrics."""
    verdict = decide(facts)
    row = metrics.newest or {}
    iteration = row.get("iteration")
    train_iters = (record.config or {}).get("training", {}).get("train_iters")
    written = number(row, "time")
    pace = metrics.iteration_time_s()
    has_eta = (
        verdict.state is JobState.RUNNING and pace is not None and iteration is not None and train_iters is not None
    )
    attempt = facts.attempt
    return RunView(
        run_id=record.run_id,
        name=record.name,
        cluster=record.cluster,
        state=verdict.state,
        detail=verdict.detail,
        attempt=attempt.number if attempt is not None else None,
        nodes=record.job.get("nodes"),
        iteration=iteration,
        train_iters=train_iters,
        loss=number(row, "lm_loss"),
        tokens_per_s=number(row, "tokens_per_s"),
        mfu=number(row, "mfu"),
        eta_s=max(0, train_iters - iteration) * pace if has_eta else None,
        metrics_age_s=max(0.0, facts.now - written) if written is not None else None,
        started=attempt.started.time if attempt is not None and attempt.started is not None else None,
        ended=verdict.ended,
        exit_code=verdict.exit_code,
        job_ids=_job_ids(record, facts),
        submission=record.submissions[-1].number if record.submissions else None,
        submitted=record.submissions[-1].time if record.submissions else None,
        attempts=facts.attempts,
        expected_start=_expected_start(verdict.state, facts),
        hosts=_hosts(facts),
    )


def _job_ids(record: RunRecord, facts: RunFacts) -> tuple[str, ...]:
    ids = [job.job_id for submission in record.submissions for job in submission.jobs]
    if facts.job is not None and facts.job.report is not None:
        ids.append(facts.job.report.job_id)  # found by its name, where submit was cut off before it had recorded it
    return tuple(dict.fromkeys(ids))


def _expected_start(state: JobState, facts: RunFacts) -> str | None:
    report = facts.job.report if facts.job is not None else None
    return report.expected_start if report is not None and state is JobState.PENDING else None


def _hosts(facts: RunFacts) -> tuple[str, ...]:
    attempt, report = facts.attempt, facts.job.report if facts.job is not None else None
    if attempt is not None and attempt.hosts:
        return attempt.hosts
    if report is not None and report.hosts:
        return report.hosts
    started = attempt.started if attempt is not None else None
    return (started.host,) if started is not None and started.host else ()
