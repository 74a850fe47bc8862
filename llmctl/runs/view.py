"""The view of one run in ``llmctl status``, with the field names of ``--json``."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from llmctl.job_state import JobState
from llmctl.runs.costs.time_split import RunCosts
from llmctl.runs.facts import SaveFacts
from llmctl.runs.failures.slow import slow_words
from llmctl.runs.hang import build_progress
from llmctl.runs.metrics import MetricsTable, number
from llmctl.runs.recent import RecentMetrics, recent_metrics
from llmctl.runs.record import PredictedStep, RunRecord
from llmctl.runs.state import RunFacts, decide

PHASES = {
    **dict.fromkeys(("data", "forward and backward", "optimizer", "agreement", "logging"), "training"),
    "evaluation": "evaluating",
    "checkpoint": "saving a checkpoint",
    "profile": "profiling",
    "export": "writing a Hugging Face folder",
}
"""Words for the phases of the training loop, whose parts of a step last too short to show."""


@dataclass(frozen=True)
class RunView:
    """One run, for people and programs. Times in seconds since 1970, durations in seconds.

    Attributes:
        run_id: the run.
        name: the user's name for the run.
        cluster: name of the profile.
        state: one of the nine states.
        detail: the reason as a sentence; empty if there is nothing to say.
        attempt: number of the last attempt; None before the first.
        nodes: number of nodes requested.
        iteration: iteration of the last metrics row.
        train_iters: last iteration of the run; None for a COMMAND.
        loss: lm_loss of that row.
        tokens_per_s: of that row.
        mfu: of that row, as a share of 1.
        eta_s: time left until train_iters at the present pace; only while the run is running.
        metrics_age_s: since that row was written.
        started: start of the last attempt.
        ended: end of the last attempt.
        exit_code: of job.sh.
        job_ids: ids of the jobs of all submissions, as the scheduler or the process table knows them.
        submission: number of the last submission; None before the first.
        submitted: time of the last submission.
        attempts: number of attempts of all submissions.
        expected_start: expected start of a pending run, as the scheduler writes it.
        hosts: the nodes of the last attempt, the head node first if known.
        skipped_iterations: fp16 steps skipped for the loss scale, up to that row.
        nan_iterations: steps of other precisions skipped because loss or gradient was not finite, up to that row.
        phase: what the ranks do now, by the newest heartbeat; only while the run is running.
        iteration_time_s: median time of an iteration in the last rows.
        peak_memory_bytes: of that row: largest peak of any rank, allocated on a GPU, resident on the CPU.
        save: the newest complete checkpoint of the last attempt; None without one, and of an older release.
        recent: the recent past of loss, tokens/s and memory; None without a row of metrics.
        costs: of all attempts; only in the status of one run, and None there if metrics.jsonl is very long.
        predicted: at the last submission; None for a COMMAND, or without a prediction.
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
    skipped_iterations: int | None = None
    nan_iterations: int | None = None
    phase: str | None = None
    iteration_time_s: float | None = None
    peak_memory_bytes: int | None = None
    save: SaveFacts | None = None
    recent: RecentMetrics | None = None
    costs: RunCosts | None = None
    predicted: PredictedStep | None = None

    @property
    def summary(self) -> str:
        """The state with its reason, such as ``failed: rank 3 ...``. Some reasons begin with the state's word."""
        if not self.detail or self.detail.startswith(self.state.value):
            return self.detail or self.state.value
        return f"{self.state}: {self.detail}"

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values; NaN and infinity, which JSON lacks, become null."""
        values = {**asdict(self), "state": str(self.state)}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def build_view(record: RunRecord, facts: RunFacts, metrics: MetricsTable) -> RunView:
    """Build the view of a run from its record, facts and last metrics."""
    verdict = decide(facts)
    row = metrics.newest or {}
    iteration = row.get("iteration")
    train_iters = (record.config or {}).get("training", {}).get("train_iters")
    written = number(row, "time")
    pace = metrics.iteration_time_s()
    # Of a run that does not move, an estimate would shift away at the speed of the clock.
    has_eta = (
        verdict.state is JobState.RUNNING and pace is not None and iteration is not None and train_iters is not None
    )
    eta_s = max(0, train_iters - iteration) * pace if has_eta else None
    attempt = facts.attempt
    return RunView(
        run_id=record.run_id,
        name=record.name,
        cluster=record.cluster,
        state=verdict.state,
        detail="; ".join(part for part in (owned_by(record), verdict.detail, *_remarks(facts, metrics)) if part),
        attempt=attempt.number if attempt is not None else None,
        nodes=record.job.get("nodes"),
        iteration=iteration,
        train_iters=train_iters,
        loss=number(row, "lm_loss"),
        tokens_per_s=number(row, "tokens_per_s"),
        mfu=number(row, "mfu"),
        eta_s=eta_s if eta_s is not None and math.isfinite(eta_s) else None,
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
        skipped_iterations=_integer(row, "skipped_iterations"),
        nan_iterations=_integer(row, "nan_iterations"),
        phase=_phase(facts) if verdict.state is JobState.RUNNING else None,
        iteration_time_s=pace,
        peak_memory_bytes=_integer(row, "peak_memory_bytes"),
        save=_newest_save(facts),
        recent=recent_metrics(metrics),
        predicted=record.submissions[-1].predicted if record.submissions else None,
    )


def owned_by(record: RunRecord) -> str:
    """Words for a run of another user; else empty."""
    return f"a run of {record.owner}" if record.owner else ""


def _remarks(facts: RunFacts, metrics: MetricsTable) -> tuple[str, ...]:
    return (*_left_out(facts), *_warnings(facts), _skipped(metrics), spike_words(metrics))


def _left_out(facts: RunFacts) -> tuple[str, ...]:
    """``n3 left out (cause)``, of a job with spare nodes."""
    started = facts.attempt.started if facts.attempt is not None else None
    left_out = started.left_out if started is not None else {}
    return tuple(f"{node} left out ({why})" for node, why in left_out.items())


def _phase(facts: RunFacts) -> str | None:
    attempt = facts.attempt
    newest = attempt.newest_heartbeat if attempt is not None else None
    if attempt is None or newest is None:
        return None
    beside = dict.fromkeys(beat.beside for beat in attempt.heartbeats if beat.beside)
    phase = build_progress(attempt.heartbeats) or PHASES.get(newest.phase, newest.phase)
    return "; ".join([phase, *beside])


def _newest_save(facts: RunFacts) -> SaveFacts | None:
    heartbeats = facts.attempt.heartbeats if facts.attempt is not None else ()
    saves = [beat.save for beat in heartbeats if beat.save is not None]
    return max(saves, key=lambda save: save.iteration, default=None)


def _warnings(facts: RunFacts) -> tuple[str, ...]:
    """The warnings in the heartbeats, each once; none after the run has ended well."""
    attempt = facts.attempt
    if attempt is None or (attempt.ending is not None and attempt.ending.code == 0):
        return ()
    warnings = [beat.warning for beat in attempt.heartbeats]
    if attempt.ending is None:
        warnings.append(slow_words(attempt.heartbeats))
    return tuple(dict.fromkeys(warning for warning in warnings if warning))


def _skipped(metrics: MetricsTable) -> str:
    """Words for steps that changed nothing, but not for those that search for the loss scale of fp16."""
    row = metrics.newest or {}
    count = _integer(row, "nan_iterations") or 0
    return f"{count} of {row.get('iteration')} steps skipped, their gradients were not finite" if count else ""


def spike_words(metrics: MetricsTable) -> str:
    """Words for the newest spike of the loss, of an attempt that goes on with the newest rows."""
    row, newest = metrics.spike, metrics.newest
    if row is None or newest is None or row.get("attempt") != newest.get("attempt"):
        return ""
    loss, before = number(row, "loss_spike"), number(row, "loss_before")
    if loss is None or before is None:
        return ""
    return f"the loss of iteration {row['iteration']} was a spike, {loss:.4g} after {before:.4g}"


def _integer(row: dict[str, Any], key: str) -> int | None:
    value = row.get(key)
    return value if type(value) is int else None


def _job_ids(record: RunRecord, facts: RunFacts) -> tuple[str, ...]:
    ids = [job.job_id for submission in record.submissions for job in submission.jobs]
    started = facts.attempt.started if facts.attempt is not None else None
    if started is not None and started.link > 1 and started.job_id:
        ids.append(started.job_id)
    if facts.waiting is not None and facts.waiting.job_id:
        ids.append(facts.waiting.job_id)
    if facts.job is not None and facts.job.report is not None:
        ids.append(facts.job.report.job_id)  # found by name: submit was cut off before recording the id
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
