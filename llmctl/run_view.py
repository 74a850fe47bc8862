"""What ``llmctl status`` shows of one run, with the field names that ``--json`` promises."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from llmctl.job_state import JobState
from llmctl.metrics_reader import MetricsTable, number
from llmctl.run_record import RunRecord
from llmctl.run_state import RunFacts, decide


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
    )
