"""Checks before a resume, and its starting point. Read-only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmctl.context import ClusterSession
from llmctl.errors import RecordError, SchedulerError, UsageError
from llmctl.job_state import JobState
from llmctl.runs.attempts import newest_attempt
from llmctl.runs.observe import leaders_of, observe_run
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import find_job
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

LATEST = "latest_checkpointed_iteration.txt"
_COMPLETE = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class StartPoint:
    """Start of the next attempt: the latest checkpoint's iteration, with a sentence."""

    iteration: int | None
    sentence: str


def check_ended(record: RunRecord, session: ClusterSession) -> None:
    """Refuse to start a run while its job may still write to its directory.

    Raises:
        RecordError: the run still runs (names the job), or its state is unknown.
        SchedulerError: the cluster cannot be reached.
    """
    transport = session.transport
    view = observe_run(record, transport, session.watch())
    if view.state.is_finished:
        return
    jobs = record.submissions[-1].jobs if record.submissions else ()
    names = ", ".join(f"{job.job_id} on {job.host}" for job in jobs) or "not recorded"
    leaders = leaders_of(record, newest_attempt(record, transport))
    is_unborn = view.state is JobState.UNKNOWN and not leaders
    if is_unborn and not _has_started_job(record, session):
        return  # submit was cut off before it started anything
    if view.state is JobState.UNKNOWN:
        raise RecordError(f"{record.run_id} may still be running (job {names}): {view.detail}")
    raise RecordError(
        f"{record.run_id} is still {view.state} (job {names}){f': {view.detail}' if view.detail else ''}"
        f"\nfollow it: llmctl logs -f {record.run_id}   end it: llmctl cancel {record.run_id}"
    )


def _has_started_job(record: RunRecord, session: ClusterSession) -> bool:
    """True if a submission without a recorded job has started processes or a job."""
    if session.backend is None:
        return bool(session.transport.processes_of_run(str(record.run_dir), []))
    if record.submissions and record.submissions[-1].jobs:
        return True
    earlier = {job.job_id for submission in record.submissions for job in submission.jobs}
    report, answer = find_job(
        session.backend, session.backend.job_name(record.run_id), session.transport, known_ids=earlier
    )
    if not answer.is_answer:
        raise SchedulerError(f"{record.run_id} may still be running: {answer.problem}", transient=True)
    return report is not None and not report.state.is_finished


def start_point(record: RunRecord, transport: Transport) -> StartPoint:
    """The starting point of a run's next attempt, from the existing checkpoints.

    Args:
        record: the record to be submitted.
        transport: the machine of the checkpoints.
    """
    if record.config is None:
        return StartPoint(None, "runs its command again")
    settings: Mapping[str, Any] = record.config.get("checkpoint", {})
    folder = settings.get("save") or str(record.run_dir / "checkpoints")
    iteration = _latest_iteration(folder, transport)
    total = record.config.get("training", {}).get("train_iters")
    if iteration is not None:
        return StartPoint(iteration, f"resumes from iteration {iteration} of {total}")
    if settings.get("load"):
        return StartPoint(None, f"starts from {settings['load']}: no checkpoint of this run in {folder}")
    return StartPoint(None, f"starts from the beginning: no checkpoint in {folder}")


def check_work_left(record: RunRecord, point: StartPoint) -> None:
    """Refuse to resume a run that has reached its last iteration.

    Raises:
        UsageError: names the flag that lengthens the run.
    """
    total = (record.config or {}).get("training", {}).get("train_iters")
    if point.iteration is not None and isinstance(total, int) and point.iteration >= total:
        raise UsageError(
            f"{record.run_id} has completed all of its {total} iterations; "
            f"--set training.train_iters=N lengthens the run, llmctl submit starts a new one"
        )


def _latest_iteration(folder: str, transport: Transport) -> int | None:
    (part,) = transport.read_parts([FileRead(f"{folder}/{LATEST}", limit=64)])
    text = part.data.decode(errors="replace").strip() if part is not None else ""
    if text.isdecimal():
        return int(text)
    # A crash may have lost the pointer; like the trainer, take the newest complete checkpoint.
    (names,) = transport.list_names([folder])
    return max((int(match[1]) for name in names if (match := _COMPLETE.fullmatch(name))), default=None)
