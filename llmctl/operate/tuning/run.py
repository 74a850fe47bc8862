"""Submit the job of a tuning, or go on with an earlier one, and follow it."""

import sys

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError
from llmctl.operate.follow import follow_run
from llmctl.operate.follow_output import PlainOutput
from llmctl.operate.tuning.plan import FILE, Tuning
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord, parse_json
from llmctl.submit.execute import execute_plan
from llmctl.submit.plan import notes_beforehand
from llmctl.transport.file_reads import FileRead

_LIMIT = 1 << 24


def earlier_run(context: Context, tuning: Tuning, session: ClusterSession) -> RunRecord | None:
    """The newest run that was asked for the same; None without one.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    name, cluster = tuning.plan.record.name, tuning.plan.record.cluster
    entries = [entry for entry in context.index.entries() if (entry.name, entry.cluster) == (name, cluster)]
    for entry in reversed(entries):
        path = f"{entry.run_dir}/{FILE}"
        (part,) = session.transport.read_parts([FileRead(path, limit=_LIMIT)])
        try:
            given = {} if part is None else parse_json(path, part.data)
            if all(given.get(key) == value for key, value in tuning.request.items()):
                return RunRecord.load(entry.run_dir, session.transport)
        except RecordError:
            continue
    return None


def has_ended(record: RunRecord, session: ClusterSession) -> bool:
    """True for a run that needs no more waiting."""
    return observe_run(record, session.transport, session.watch()).state.is_finished


def submit_tuning(context: Context, tuning: Tuning) -> RunRecord:
    """Submit the job.

    Raises:
        LlmctlError: as a submission.
    """
    for line in notes_beforehand(tuning.plan, context, has_page=False):
        context.tell(line)
    record = execute_plan(tuning.plan, context)
    jobs = ", ".join(job.job_id for job in record.submissions[-1].jobs)
    context.tell(f"{record.run_id}: job {jobs} on {record.cluster}, {len(tuning.candidates)} layouts")
    return record


def follow_tuning(record: RunRecord, session: ClusterSession) -> int:
    """Show the trials until the run has ended; the exit code.

    Raises:
        FollowedRunFailed: it did not complete.
        SchedulerError: the machine cannot be reached.
    """
    return follow_run(record, session.transport, backend=session.backend, output=PlainOutput(sys.stderr))
