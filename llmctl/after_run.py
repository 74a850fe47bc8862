"""``--after RUN``: the jobs that a new one waits for."""

from llmctl.attempt_reader import find_attempts
from llmctl.cluster_reach import ClusterReach
from llmctl.errors import UsageError
from llmctl.invocation import Invocation
from llmctl.job_state import JobState
from llmctl.profile import ClusterProfile
from llmctl.run_observer import observe_run
from llmctl.run_record import RunRecord


def jobs_before(
    invocation: Invocation, reference: str, profile: ClusterProfile, *, asks_scheduler: bool
) -> tuple[str, ...]:
    """Ids of the jobs of a run's last submission; none if it has ended well, since there is nothing to wait for.

    The new job starts if they end well. A scheduler that cannot tell how a job ended (Grid Engine) starts it anyway.

    Args:
        invocation: of this call.
        reference: run id, a unique prefix of one, a run's name or a job id.
        profile: of the cluster that the new job goes to.
        asks_scheduler: otherwise only the run's own files say whether it has ended.

    Raises:
        RecordError: there is no such run, or its record cannot be read.
        UsageError: it is elsewhere, it ended otherwise, or it has no job.
        SchedulerError: the cluster cannot be reached.
    """
    entry = invocation.index.find(reference)
    if entry.cluster != profile.name:
        raise UsageError(
            f"--after {reference}: {entry.run_id} is on {entry.cluster}, and {profile.name} cannot wait for its jobs; "
            "submit when it has ended"
        )
    reach = ClusterReach.of(invocation, entry.cluster, f"run {entry.run_id}")
    record = RunRecord.load(entry.run_dir, reach.hands)
    state, detail = _state(record, reach) if asks_scheduler else _state_by_files(record, reach)
    if state is JobState.COMPLETED:
        return ()
    if state is not None and state.is_finished:
        raise UsageError(
            f"--after {reference}: {entry.run_id} did not end well: {detail or state}\n"
            f"llmctl resume {entry.run_id} goes on with it; to start all the same, leave --after out"
        )
    jobs = record.submissions[-1].jobs if record.submissions else ()
    if not jobs:
        raise UsageError(
            f"--after {reference}: {entry.run_id} has no job to wait for; llmctl status {entry.run_id} says how it is"
        )
    return tuple(job.job_id for job in jobs)


def _state(record: RunRecord, reach: ClusterReach) -> tuple[JobState | None, str]:
    view = observe_run(record, reach.hands, reach.watch())
    return view.state, view.detail


def _state_by_files(record: RunRecord, reach: ClusterReach) -> tuple[JobState | None, str]:
    beginning = find_attempts([record], reach.hands)[0].newest
    ending = beginning.ending if beginning is not None else None
    if ending is None or not ending.is_final:
        return None, ""
    return (JobState.COMPLETED if ending.reason == "completed" else JobState.FAILED), ending.reason or ""
