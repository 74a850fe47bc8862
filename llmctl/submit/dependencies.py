"""``--after RUN`` and ``--after any:RUN``: the jobs that a new job waits for."""

import re
from dataclasses import dataclass

from llmctl.backends import load_queue_backend
from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, UsageError
from llmctl.job_state import JobState
from llmctl.runs.attempts import find_attempts
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord
from llmctl.site.profile import ClusterProfile

_ANY = "any:"
_JOB_ID = re.compile(r"\w[\w.:@+=,\[\]-]*")
"""Ids that a directive holds without quotes. A record may have been changed, and Flux has letters beyond ASCII."""


@dataclass(frozen=True)
class Dependencies:
    """Jobs that a new job waits for.

    Attributes:
        ids: of the jobs of a run's last submission; empty if the run has already ended.
        is_any: start after any end; otherwise only after completion.
        warnings: for the user.
    """

    ids: tuple[str, ...] = ()
    is_any: bool = False
    warnings: tuple[str, ...] = ()


def find_dependencies(context: Context, after: str, profile: ClusterProfile, *, asks_scheduler: bool) -> Dependencies:
    """The jobs of a run's last submission. On Grid Engine any end of those jobs lets the new job start.

    Args:
        context: of this call.
        after: run id, unique prefix of a run id, name of a run or job id; may begin with ``any:``.
        profile: of the new job's cluster.
        asks_scheduler: False to read the run's own files only.

    Raises:
        RecordError: no such run, or its record cannot be read.
        UsageError: the run is on another cluster, ended without completing, or has no job.
        SchedulerError: the cluster cannot be reached.
    """
    is_any, reference = after.startswith(_ANY), after.removeprefix(_ANY)
    if not reference:
        raise UsageError(f"--after {after}: names no run; give --after RUN, or --after any:RUN to start after any end")
    entry = context.index.find(reference)
    if entry.cluster != profile.name:
        raise UsageError(
            f"--after {after}: {entry.run_id} is on {entry.cluster}, and {profile.name} cannot wait for its jobs; "
            "submit after the run has ended"
        )
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    record = RunRecord.load(entry.run_dir, session.transport)
    state, detail = _state(record, session) if asks_scheduler else _state_by_files(record, session)
    # Schedulers forget ended jobs and refuse to wait for them, so that an ended run is decided here.
    if state is JobState.COMPLETED or (is_any and state is not None and state.is_finished):
        return Dependencies()
    if state is not None and state.is_finished:
        raise UsageError(
            f"--after {after}: {entry.run_id} did not complete: {detail or state}\n"
            f"llmctl resume {entry.run_id} continues the run; to start anyway, give --after any:{entry.run_id}"
        )
    if record.job.get("chain"):
        raise UsageError(
            f"--after {after}: {entry.run_id} goes on in further jobs (job.chain), which no job can wait for; "
            "submit after the run has ended"
        )
    jobs = record.submissions[-1].jobs if record.submissions else ()
    if not jobs:
        raise UsageError(f"--after {after}: {entry.run_id} has no job to wait for; see llmctl status {entry.run_id}")
    wrong = next((job.job_id for job in jobs if not _JOB_ID.fullmatch(job.job_id)), None)
    if wrong is not None:
        raise RecordError(f"{record.run_dir}/run.json: {wrong!r} cannot be the id of a job; submit without --after")
    backend = load_queue_backend(profile.scheduler)
    warnings: tuple[str, ...] = ()
    if not is_any and backend is not None and not backend.tells_ends_apart:
        warnings = (f"--after {after}: {profile.name} cannot tell how a job ended: the new job starts after any end",)
    return Dependencies(tuple(job.job_id for job in jobs), is_any, warnings)


def _state(record: RunRecord, session: ClusterSession) -> tuple[JobState | None, str]:
    view = observe_run(record, session.transport, session.watch())
    return view.state, view.detail


def _state_by_files(record: RunRecord, session: ClusterSession) -> tuple[JobState | None, str]:
    beginning = find_attempts([record], session.transport)[0].newest
    ending = beginning.ending if beginning is not None else None
    if ending is None or not ending.is_final:
        return None, ""
    return (JobState.COMPLETED if ending.reason == "completed" else JobState.FAILED), ending.reason or ""
