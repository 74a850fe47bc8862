"""The plan of a resume: checks before it, and its starting point. Writes nothing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from posixpath import normpath
from typing import Any

from llmctl.context import ClusterSession, Context
from llmctl.doctor.file_systems import parse_space
from llmctl.errors import RecordError, SchedulerError, UsageError
from llmctl.job_state import JobState
from llmctl.runs.attempts import attempt_numbers, newest_attempt
from llmctl.runs.index import IndexEntry
from llmctl.runs.observe import leaders_of, observe_run
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import find_job
from llmctl.submit.job import SubmitPlan
from llmctl.submit.plan_resume import plan_resume
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport
from trainer.config.records.saved_progress import METRICS_TAIL, SAVED, SavedProgress, find_saved_progress

LATEST = "latest_checkpointed_iteration.txt"
_COMPLETE = re.compile(r"iter_(\d{7,})")
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class StartPoint:
    """Start of the next attempt: the latest checkpoint's iteration, with a sentence."""

    iteration: int | None
    sentence: str


@contextmanager
def planned_resume(
    context: Context,
    entry: IndexEntry,
    *,
    nodes: int | None = None,
    exclude: str | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    dry_run: bool = False,
) -> Iterator[tuple[SubmitPlan, StartPoint]]:
    """The plan of a run's next submission, and its starting point. Until the block ends, nobody else resumes the run.

    Args:
        context: this call of llmctl.
        entry: the run.
        nodes: see plan_resume.
        exclude: see plan_resume.
        settings: see plan_resume.
        dry_run: the plan is only shown: the run may still go on, and need not be locked.

    Raises:
        LlmctlError: see plan_resume, check_ended, start_point and check_work_left.
    """
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    transport = session.transport
    RunRecord.load_own(entry.run_dir, transport)
    with nullcontext() if dry_run else transport.lock(f"{entry.run_dir}/.lock"):
        record = RunRecord.load(entry.run_dir, transport)
        if not dry_run:
            check_ended(record, session)
        plan = plan_resume(context, record, nodes=nodes, exclude=exclude, settings=settings, dry_run=dry_run)
        point = start_point(plan.record, session)
        check_work_left(plan.record, point)
        yield plan, point


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


def start_point(record: RunRecord, session: ClusterSession) -> StartPoint:
    """The starting point of a run's next attempt, from the existing checkpoints.

    Args:
        record: the record to be submitted.
        session: the cluster of the run.

    Raises:
        RecordError: the run has saved progress, and its folder of checkpoints holds none.
    """
    if record.config is None:
        return StartPoint(None, "runs its command again")
    settings: Mapping[str, Any] = record.config.get("checkpoint", {})
    folder = settings.get("save") or str(record.run_dir / "checkpoints")
    iteration = _latest_iteration(folder, session.transport)
    total = record.config.get("training", {}).get("train_iters")
    if iteration is not None:
        return StartPoint(iteration, f"resumes from iteration {iteration} of {total}")
    saved = _saved_progress(record, settings, session.transport)
    if saved is not None:
        unseen = _check_cannot_see(folder, saved, session)
        return StartPoint(None, f"resumes from iteration {saved.iteration} of {total}, if the job finds it: {unseen}")
    if settings.get("load") and normpath(settings["load"]) != normpath(folder):
        return StartPoint(None, f"starts from {settings['load']}: no checkpoint of this run in {folder}")
    return StartPoint(None, f"starts from the beginning: no checkpoint in {folder}")


def _saved_progress(record: RunRecord, settings: Mapping[str, Any], transport: Transport) -> SavedProgress | None:
    """Saved progress by the files in the run directory."""
    run_dir = str(record.run_dir)
    attempts = attempt_numbers(record, transport)
    reads = [FileRead(f"{run_dir}/{SAVED}"), FileRead(f"{run_dir}/metrics.jsonl", -METRICS_TAIL, METRICS_TAIL)]
    reads += [FileRead(f"{run_dir}/attempts/{number}/outcome.json") for number in attempts]
    parts = [part.data if part is not None else None for part in transport.read_parts(reads)]
    return find_saved_progress(run_dir, parts[0], parts[1], parts[2:], settings.get("save_interval"))


def _check_cannot_see(folder: str, saved: SavedProgress, session: ClusterSession) -> str:
    """Reason for which the job may see checkpoints that this machine does not see.

    The machine of the jobs, the run directory, and network file systems leave no such reason. A path on the own disk of
    the login node may be a mount that only the nodes have, or a disk of a node.

    Raises:
        RecordError: there is no such reason.
    """
    transport = session.transport
    (facts,) = transport.stat_paths([folder])
    if session.backend is not None and not f"{folder}/".startswith(f"{saved.run_dir}/"):
        answer = transport.run(["df", "-PTk", "--", facts.nearest], timeout_s=_TIMEOUT_S, only_reads=True)
        space = parse_space(answer.stdout)
        if space is None or not space.is_network:
            kind = space.kind if space is not None else "an unknown file system"
            return f"{folder} is on {kind} here, so that the nodes may see other files; the job looks there and waits"
    lack = "does not exist"
    if facts.kind:
        (names,) = transport.list_names([folder])
        lack = "holds no checkpoint" if names else "is empty"
    raise RecordError(saved.missing(folder, f"{lack} on {transport.host}"))


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
