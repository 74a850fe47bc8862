"""Attach to a run: environment variables; process, node and job of a rank."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from llmctl.backends import capabilities_of
from llmctl.context import ClusterSession
from llmctl.durations import duration_text
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
"""A rank without a heartbeat for this long may have ended."""


@dataclass(frozen=True)
class AttachedJob:
    """The scheduler's job of a run, and the node to attach to."""

    job_id: str
    host: str


@dataclass(frozen=True)
class Attachment:
    """A run to attach to, with its environment.

    Attributes:
        record: the run's record.
        variables: variables of its jobs, without secrets.
        warning: a message for the user; may be empty.
        place: job and node of the run; None: on this machine.
    """

    record: RunRecord
    variables: Mapping[str, str]
    warning: str = ""
    place: AttachedJob | None = None

    @property
    def is_on_cpu(self) -> bool:
        """True if the run's config uses CPUs only."""
        return bool((self.record.config or {}).get("training", {}).get("device") == "cpu")


def attach_to_run(record: RunRecord, session: ClusterSession, rank: int | None) -> Attachment:
    """Collect variables and place of a run; with ``rank``, also the rank's process.

    Raises:
        RecordError: the rank does not exist (lists the existing ranks), or the run has no job now.
        SchedulerError: the state of the run's job is unknown.
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
        raise RecordError(f"{record.run_id}: the nodes of job {job_id} are not known yet; try again")
    return Attachment(record, variables, warning or f"on {host}, its head node", AttachedJob(job_id, host))


def _living_job(record: RunRecord, session: ClusterSession) -> str:
    """The id of the running job."""
    view = observe_run(record, session.transport, session.watch())
    job_ids = [job.job_id for job in record.submissions[-1].jobs] if record.submissions else []
    job_ids = job_ids or list(view.job_ids[-1:])
    why = f": {view.detail}" if view.detail else ""
    new = f"llmctl interactive --cluster {record.cluster} asks for a new node"
    if view.state.is_finished:
        raise RecordError(f"{record.run_id} has ended, {view.state}{why}; its job is gone\n{new}")
    if view.state is JobState.PENDING or not job_ids:
        raise RecordError(f"{record.run_id} is {view.state}{why}; it has no node yet\n{new}")
    if view.state is JobState.UNKNOWN:
        raise SchedulerError(f"{record.run_id}: the state of its job is unknown{why}", transient=True)
    return job_ids[0]


def _heartbeat_of(
    record: RunRecord, newest: AttemptBeginning | None, rank: int, transport: Transport
) -> Heartbeat | None:
    if newest is None:
        raise RecordError(f"{record.run_id}: there is no rank {rank}: no attempt has started yet")
    (names,) = transport.list_names([str(newest.directory)])
    present = rank_logs(names)
    if rank not in present:
        there = f"there are ranks {spans(sorted(present))}" if present else "no rank has started yet"
        raise RecordError(f"{record.run_id}: there is no rank {rank} in attempt {newest.number}; {there}")
    (part,) = transport.read_parts([FileRead(f"{newest.directory}/heartbeat/rank-{rank:05d}.json")])
    return parse_heartbeat(part.data if part is not None else None)


def _lives(record: RunRecord, heartbeat: Heartbeat, transport: Transport) -> bool:
    # Only processes with the run in their environment: the pid of an old heartbeat may have been reused.
    return heartbeat.pid in {one.pid for one in transport.processes_of_run(str(record.run_dir), [])}


def _node_of(rank: int | None, beat: Heartbeat | None, newest: AttemptBeginning, transport: Transport) -> str | None:
    """The node of a rank, under the scheduler's name; the head node if there is no rank."""
    slots = _slots(transport, f"{newest.directory}/hostfile")
    if rank is None:
        return slots[0][0] if slots else newest.started.host if newest.started is not None else None
    if beat is not None and beat.host:
        short = beat.host.partition(".")[0]
        same = [name for name, _ in slots if name.partition(".")[0] == short]
        if len(same) == 1:
            return same[0]
    # Every launcher fills one node after another.
    for name, count in slots:
        if rank < count:
            return name
        rank -= count
    return beat.host if beat is not None else None


def _slots(transport: Transport, hostfile: str) -> list[tuple[str, int]]:
    """Hosts of an attempt and their numbers of ranks, head node first."""
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
        doing += f", last heartbeat {duration_text(silent_s)} ago"
    return f"rank {rank} is process {beat.pid} on {beat.host}, {doing}"
