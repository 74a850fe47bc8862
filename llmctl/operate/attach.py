"""Beside a run: which variables its processes have, which process a rank is, and on which node of which job."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from llmctl.backends import capabilities_of
from llmctl.context import ClusterSession
from llmctl.durations import spoken
from llmctl.errors import RecordError, SchedulerError
from llmctl.job_state import JobState
from llmctl.runs.attempts import AttemptBeginning, find_attempts
from llmctl.runs.facts import Heartbeat, parse_heartbeat
from llmctl.runs.log_selection import spans
from llmctl.runs.logs import rank_logs
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

SILENT_S = 60.0
"""A rank that has written no heartbeat for so long may have ended."""


@dataclass(frozen=True)
class AttachedJob:
    """The scheduler's job of a run, and the node of it that is meant."""

    job_id: str
    host: str


@dataclass(frozen=True)
class Attachment:
    """A run whose environment is wanted.

    Attributes:
        record: of the run.
        variables: those of its jobs that can be given to a visitor; secrets are not.
        warning: what the visitor should know; may be empty.
        place: where the run is; None: on this machine.
    """

    record: RunRecord
    variables: Mapping[str, str]
    warning: str = ""
    place: AttachedJob | None = None

    @property
    def is_on_cpu(self) -> bool:
        """Whether its config keeps it off the GPUs."""
        return bool((self.record.config or {}).get("training", {}).get("device") == "cpu")


def attach_to_run(record: RunRecord, session: ClusterSession, rank: int | None) -> Attachment:
    """What a visitor of a run is given; with ``rank``, also which process that rank is.

    Raises:
        RecordError: the rank is not there, says which are; or the run's job is gone, or not there yet.
        SchedulerError: nobody can tell whether the run has a job.
    """
    job_id = _living_job(record, session) if not capabilities_of(session.profile.scheduler).starts_in_place else None
    variables = dict(record.job.get("env", {}))
    newest = find_attempts([record], session.transport)[0].newest
    if newest is not None:
        variables["LLMCTL_ATTEMPT"] = str(newest.number)
    beat, warning = None, ""
    if rank is not None:
        beat = _heartbeat_of(record, newest, rank, session.transport)
        is_alive = beat is not None and (job_id is not None or _lives(record, beat, session.transport))
        warning = _warning(rank, beat if is_alive else None)
        variables["LLMCTL_RANK"] = str(rank)
        if beat is not None and is_alive:
            variables["LLMCTL_RANK_PID"] = str(beat.pid)
    if job_id is None:
        return Attachment(record, variables, warning)
    host = _node_of(rank, beat, newest, session.transport) if newest is not None else None
    if host is None:
        raise RecordError(f"{record.run_id}: its job {job_id} does not say yet which nodes it has; try again")
    return Attachment(record, variables, warning or f"on {host}, its head node", AttachedJob(job_id, host))


def _living_job(record: RunRecord, session: ClusterSession) -> str:
    """The id of the job that runs now."""
    view = observe_run(record, session.transport, session.watch())
    job_ids = [job.job_id for job in record.submissions[-1].jobs] if record.submissions else []
    job_ids = job_ids or list(view.job_ids[-1:])
    why = f": {view.detail}" if view.detail else ""
    new = f"llmctl interactive --cluster {record.cluster} asks for a node of its own"
    if view.state.is_finished:
        raise RecordError(f"{record.run_id} has ended, {view.state}{why}; its job is gone\n{new}")
    if view.state is JobState.PENDING or not job_ids:
        raise RecordError(f"{record.run_id} is {view.state}{why}; it has no node yet\n{new}")
    if view.state is JobState.UNKNOWN:
        raise SchedulerError(f"{record.run_id}: whether its job runs is not known{why}", transient=True)
    return job_ids[0]


def _heartbeat_of(
    record: RunRecord, newest: AttemptBeginning | None, rank: int, transport: Transport
) -> Heartbeat | None:
    if newest is None:
        raise RecordError(f"{record.run_id}: there is no rank {rank}; it has made no attempt yet")
    (names,) = transport.list_names([str(newest.directory)])
    present = rank_logs(names)
    if rank not in present:
        there = f"there are ranks {spans(sorted(present))}" if present else "no rank has started yet"
        raise RecordError(f"{record.run_id}: there is no rank {rank} in attempt {newest.number}; {there}")
    (part,) = transport.read_parts([FileRead(f"{newest.directory}/heartbeat/rank-{rank:05d}.json")])
    return parse_heartbeat(part.data if part is not None else None)


def _lives(record: RunRecord, heartbeat: Heartbeat, transport: Transport) -> bool:
    # Only what carries the run in its environment: the pid in an old heartbeat may be another process's by now.
    return heartbeat.pid in {one.pid for one in transport.processes_of_run(str(record.run_dir), [])}


def _node_of(rank: int | None, beat: Heartbeat | None, newest: AttemptBeginning, transport: Transport) -> str | None:
    """The node of a rank, by the name that the scheduler knows it by; the head's for no rank."""
    slots = _slots(transport, f"{newest.directory}/hostfile")
    if rank is None:
        return slots[0][0] if slots else newest.started.host if newest.started is not None else None
    if beat is not None and beat.host:
        short = beat.host.partition(".")[0]
        same = [name for name, _ in slots if name.partition(".")[0] == short]
        if len(same) == 1:
            return same[0]
    # Every launcher fills one node after the other.
    for name, count in slots:
        if rank < count:
            return name
        rank -= count
    return beat.host if beat is not None else None


def _slots(transport: Transport, hostfile: str) -> list[tuple[str, int]]:
    """Hosts of an attempt and how many ranks each has, the head first, as job.sh writes them."""
    (part,) = transport.read_parts([FileRead(hostfile)])
    lines = part.data.decode(errors="replace").splitlines() if part is not None else []
    pairs = [line.split(" slots=", 1) for line in lines if " slots=" in line]
    return [(name, int(count)) for name, count in pairs if count.isdecimal()]


def _warning(rank: int, beat: Heartbeat | None) -> str:
    if beat is None:
        return f"rank {rank} has ended"
    doing = f"in phase {beat.phase} of iteration {beat.iteration}"
    silent_s = time.time() - beat.time
    if silent_s > SILENT_S:
        doing += f", last heard of {spoken(silent_s)} ago"
    return f"rank {rank} is process {beat.pid} on {beat.host}, {doing}"
