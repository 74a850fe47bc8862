"""Ending a run: everything that it started on this machine, and nothing else."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmctl.attempt_reader import newest_attempt
from llmctl.errors import RecordError, SchedulerError
from llmctl.hands import Hands
from llmctl.job_state import JobState
from llmctl.processes import ProcessIdentity
from llmctl.run_lock import run_lock
from llmctl.run_observer import is_elsewhere, leaders_of, observe_run
from llmctl.run_record import RunRecord, write_file
from llmctl.run_view import RunView

GRACE_S = 10.0
"""Seconds to save: enough for a step and a small checkpoint; whoever wants more says --grace."""


class CancelHands(Hands, Protocol):
    """What ending asks of a transport, on top of looking."""

    def end_run(self, run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
        """See llmctl.processes."""


@dataclass(frozen=True)
class CancelOutcome:
    """The run as it is now, and whether it had ended before it was asked to."""

    view: RunView
    had_ended: bool


def cancel_run(record: RunRecord, hands: CancelHands, *, grace_s: float = GRACE_S) -> CancelOutcome:
    """End a run; one that has ended already stays as it is.

    job.sh gets SIGTERM, and the trainer saves at its next step. Whatever of the run is left after the grace is killed.
    A process is only signalled once it is known to belong to the run.

    Raises:
        SchedulerError: something could not be ended, or runs where this machine cannot see it.
        RecordError: the record cannot be written, or another llmctl is at work on the run.
    """
    with run_lock(record.run_dir):
        record = RunRecord.load(record.run_dir)
        beginning = newest_attempt(record, hands)
        view = observe_run(record, hands)
        leaders = leaders_of(record, beginning)
        run_dir = str(record.run_dir)
        if is_elsewhere(beginning, leaders, hands) and not view.state.is_finished:
            raise SchedulerError(f"{record.run_id}: {view.detail}", transient=False)
        if view.state.is_finished and not hands.processes_of_run(run_dir, leaders):
            return CancelOutcome(view, had_ended=True)
        if view.state is JobState.PENDING and not leaders:
            raise SchedulerError(f"{record.run_id} is being submitted at this moment", transient=True)
        if not view.state.is_finished:
            record = record.with_cancel_requested(time.time())
            record.save()
            if beginning is not None:
                _mark(record, beginning.number, grace_s)
        _end(record.run_dir, leaders, hands, grace_s)
        return CancelOutcome(observe_run(record, hands), had_ended=view.state.is_finished)


def end_without_record(run_dir: Path, hands: CancelHands, *, grace_s: float = GRACE_S) -> int:
    """End what still runs of a run whose record is gone or damaged; how many processes that were.

    They are known by their environment alone.

    Raises:
        SchedulerError: something could not be ended.
    """
    present = hands.processes_of_run(str(run_dir), [])
    _end(run_dir, [], hands, grace_s)
    return len(present)


def _end(run_dir: Path, leaders: Sequence[ProcessIdentity], hands: CancelHands, grace_s: float) -> None:
    left = hands.end_run(str(run_dir), leaders, grace_s=grace_s)
    if left:
        pids = ", ".join(str(identity.pid) for identity in left)
        raise SchedulerError(f"{run_dir.name}: processes {pids} could not be ended", transient=True)


def _mark(record: RunRecord, attempt: int, grace_s: float) -> None:
    """attempts/K/cancel tells job.sh that this is a cancel, and how many seconds the trainer has to save."""
    try:
        write_file(record.run_dir / "attempts" / str(attempt) / "cancel", f"{round(grace_s)}\n")
    except OSError as error:
        raise RecordError(f"{record.run_dir}: cannot be written: {error.strerror}") from None
