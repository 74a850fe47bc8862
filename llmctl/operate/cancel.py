"""End a run: all of its processes, on any machine, and no other process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.backends.base import QueueBackend
from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, SchedulerError
from llmctl.job_state import JobState
from llmctl.operate.queue_cancel import QueueCancel, end_by_name
from llmctl.runs.attempts import newest_attempt
from llmctl.runs.index import IndexEntry
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.observe import hosts_of, is_elsewhere, leaders_of, observe_run
from llmctl.runs.record import RunRecord
from llmctl.runs.view import RunView
from llmctl.supervisor.chain.links import cancelled_name
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.processes import ProcessIdentity
from llmctl.transport.protocol import Transport, transport_for

GRACE_S = 10.0
"""Seconds to save: enough for a step and a small checkpoint; --grace gives more."""


_TELLS_WHY = (JobState.FAILED, JobState.TIMEOUT, JobState.PREEMPTED, JobState.NODE_FAIL)
"""Ends with a reason, which may be long."""


@dataclass(frozen=True)
class Cancelled:
    """A run after its cancel.

    Attributes:
        view: of the run; None of a run without a valid record, whose remains were ended.
        had_ended: True if the run had ended before.
        sentence: what came of it.
    """

    view: RunView | None
    had_ended: bool
    sentence: str


def cancel_entry(context: Context, entry: IndexEntry, *, grace_s: float = GRACE_S) -> Cancelled:
    """End a run of the index, also one whose record is lost; the index stores its state.

    Args:
        context: this call of llmctl.
        entry: the run.
        grace_s: seconds to save.

    Raises:
        SchedulerError: a process or job could not be ended, or may belong to another run.
        RecordError: the record cannot be read, and nothing of the run is left to end; or it is another user's.
        ProfileError: the cluster of the run has no profile any more.
    """
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    try:
        record = RunRecord.load_own(entry.run_dir, session.transport)
    except RecordError as error:
        ended = end_without_record(entry.run_dir, session.transport, session.backend, grace_s=grace_s)
        if not ended:
            raise
        return Cancelled(None, False, f"{entry.run_id}: ended {ended}; {error.message}")
    outcome = cancel_run(record, session.transport, session.backend, grace_s=grace_s)
    view = outcome.view
    if view.state.is_finished:
        session.remove_secrets(context, [record])
    context.index.update_state(view.run_id, view.state.value, time.time())
    if not outcome.had_ended:
        return Cancelled(view, False, f"{view.run_id}: {view.detail or view.state}")
    how = f"; llmctl status {view.run_id} tells why" if view.state in _TELLS_WHY else ""
    return Cancelled(view, True, f"{view.run_id} had already ended: {view.state}{how}")


@dataclass(frozen=True)
class CancelOutcome:
    """The run's view after the cancel, and whether the run had ended before."""

    view: RunView
    had_ended: bool


def cancel_run(
    record: RunRecord, transport: Transport, backend: QueueBackend | None = None, *, grace_s: float = GRACE_S
) -> CancelOutcome:
    """End a run. A run that has already ended stays unchanged.

    The trainer is asked to save at its next step. After the grace period, the remaining processes are killed, by the
    scheduler if there is one. Nothing is ended unless it is known to belong to the run.

    Args:
        record: the run's record.
        transport: the machine of its files, and of its processes or its scheduler's commands.
        backend: the scheduler's backend; None where jobs are processes.
        grace_s: seconds to save.

    Raises:
        SchedulerError: a process or job could not be ended, or may belong to another run.
        RecordError: the record cannot be written, or another llmctl is working on the run.
    """
    with transport.lock(f"{record.run_dir}/.lock"):
        record = RunRecord.load(record.run_dir, transport)
        if backend is None:
            return _cancel_processes(record, transport, grace_s)
        view = observe_run(record, transport, SchedulerWatch(backend, transport))
        had_ended = view.state.is_finished
        if not had_ended:
            record = _cancel_in_queue(record, transport, backend, grace_s)
            view = observe_run(record, transport, SchedulerWatch(backend, transport))
        return CancelOutcome(view, had_ended)


def end_without_record(
    run_dir: Path, transport: Transport, backend: QueueBackend | None = None, *, grace_s: float = GRACE_S
) -> str:
    """End the remains of a run without a valid record; returns their description, empty if there were none.

    Processes are identified by their environment alone, jobs of a scheduler by their name.

    Raises:
        SchedulerError: a process or job could not be ended, or the scheduler does not answer.
    """
    if backend is not None:
        job_id = end_by_name(run_dir.name, backend, transport)
        return f"its job {job_id}" if job_id else ""
    present = transport.processes_of_run(str(run_dir), [])
    _end(run_dir, [], transport, grace_s)
    return f"{len(present)} processes" if present else ""


def _cancel_in_queue(record: RunRecord, transport: Transport, backend: QueueBackend, grace_s: float) -> RunRecord:
    marked = record.with_cancel_requested(transport.now())

    def mark(attempt: int | None) -> None:
        marked.save(transport)
        if record.job.get("chain"):
            _end_chain(record, transport)
        if attempt is not None:
            _mark(record, attempt, transport, grace_s)

    QueueCancel(record, backend, transport, grace_s, mark).end()
    return marked


def _cancel_processes(record: RunRecord, transport: Transport, grace_s: float) -> CancelOutcome:
    transport = _on_its_hosts(record, transport)
    beginning = newest_attempt(record, transport)
    view = observe_run(record, transport)
    leaders = leaders_of(record, beginning)
    run_dir = str(record.run_dir)
    if is_elsewhere(beginning, leaders, transport) and not view.state.is_finished:
        raise SchedulerError(f"{record.run_id}: {view.detail}", transient=False)
    if view.state.is_finished and not transport.processes_of_run(run_dir, leaders):
        return CancelOutcome(view, had_ended=True)
    if view.state is JobState.PENDING and not leaders:
        raise SchedulerError(f"{record.run_id} is being submitted at this moment", transient=True)
    if not view.state.is_finished:
        record = record.with_cancel_requested(transport.now())
        record.save(transport)
        if beginning is not None:
            _mark(record, beginning.number, transport, grace_s)
    _end(record.run_dir, leaders, transport, grace_s)
    return CancelOutcome(observe_run(record, transport), had_ended=view.state.is_finished)


def _on_its_hosts(record: RunRecord, transport: Transport) -> Transport:
    """Transport on the machines of the run's last submission."""
    hosts = hosts_of(record)
    unlisted = [host for host in hosts if host not in getattr(transport, "hosts", hosts)]
    if unlisted:
        raise SchedulerError(
            f"{record.run_id} was started on {', '.join(unlisted)}, no longer under hosts of {record.cluster}; "
            "list it again to cancel the run",
            transient=False,
        )
    return transport_for(transport, hosts)


def _end(run_dir: Path, leaders: Sequence[ProcessIdentity], transport: Transport, grace_s: float) -> None:
    left = transport.end_run(str(run_dir), leaders, grace_s=grace_s)
    if left:
        pids = ", ".join(str(identity.pid) for identity in left)
        raise SchedulerError(f"{run_dir.name}: processes {pids} could not be ended", transient=True)


def _end_chain(record: RunRecord, transport: Transport) -> None:
    """Write the mark that keeps a further job of the submission from beginning: it may be on its way to the queue."""
    folder = f"{record.run_dir}/attempts"
    name = cancelled_name(record.submissions[-1].number)
    try:
        transport.make_folder(folder, mode=0o755)
        transport.write_files([FileWrite(f"{folder}/{name}", b"\n")])
    except OSError as error:
        raise RecordError(f"{record.run_dir}: cannot be written: {error.strerror}") from None


def _mark(record: RunRecord, attempt: int, transport: Transport, grace_s: float) -> None:
    """Write attempts/K/cancel: tells job.sh of the cancel, and the trainer's seconds to save."""
    path = f"{record.run_dir}/attempts/{attempt}/cancel"
    try:
        transport.write_files([FileWrite(path, f"{round(grace_s)}\n".encode())])
    except OSError as error:
        raise RecordError(f"{record.run_dir}: cannot be written: {error.strerror}") from None
