"""Gathering the facts about runs through a transport: a fixed number of round trips, whatever the number of runs.

Order matters: whether a process lives is asked before exit.json is read. job.sh writes exit.json as its last act, so a
process seen gone has either left one or will never leave one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Protocol

from llmctl.file_reads import FilePart, FileRead
from llmctl.job_state import JobState
from llmctl.metrics_reader import table_of_tail, tail_of
from llmctl.processes import ProcessIdentity, ProcessReport
from llmctl.run_facts import (
    AttemptFacts,
    Started,
    parse_ending,
    parse_error,
    parse_heartbeat,
    parse_outcome,
    parse_started,
)
from llmctl.run_record import RunRecord
from llmctl.run_state import JobAnswer, RunFacts
from llmctl.run_view import RunView, build_view


class RunHands(Protocol):
    """What observing asks of a transport: one call is one round trip."""

    def read_parts(self, reads: Sequence[FileRead]) -> list[FilePart | None]:
        """See llmctl.file_reads."""

    def list_names(self, directories: Sequence[str]) -> list[list[str]]:
        """See llmctl.file_reads."""

    def inspect_processes(self, identities: Sequence[ProcessIdentity]) -> ProcessReport:
        """See llmctl.processes.inspect."""

    def processes_of_run(self, run_dir: str, leaders: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
        """See llmctl.processes."""


def observe_runs(records: Sequence[RunRecord], hands: RunHands) -> list[RunView]:
    """The views of runs that one transport reaches, in order."""
    tails = hands.read_parts([tail_of(f"{record.run_dir}/metrics.jsonl") for record in records])
    views = []
    for record, facts, tail in zip(records, gather_facts(records, hands), tails, strict=True):
        metrics = table_of_tail(tail)
        views.append(build_view(record, replace(facts, iteration_time_s=metrics.iteration_time_s()), metrics))
    return views


def observe_run(record: RunRecord, hands: RunHands) -> RunView:
    """The view of one run."""
    return observe_runs([record], hands)[0]


def gather_facts(records: Sequence[RunRecord], hands: RunHands) -> list[RunFacts]:
    """What the state of each run is decided from, in order."""
    beginnings = _find_attempts(records, hands)
    leaders = [leaders_of(record, beginning) for record, beginning in zip(records, beginnings, strict=True)]
    report = hands.inspect_processes([leader for group in leaders for leader in group])
    attempts = _read_attempts(beginnings, hands)
    facts, alive = [], list(report.alive)
    for record, beginning, group, attempt in zip(records, beginnings, leaders, attempts, strict=True):
        states, alive = alive[: len(group)], alive[len(group) :]
        job = _process_answer(group, states, report, beginning.started if beginning is not None else None)
        if job is not None and job.state.is_finished and (attempt is None or attempt.ending is None):
            survivors = len(hands.processes_of_run(str(record.run_dir), group))
            job = JobAnswer(job.state, job.raw, survivors)
        last = record.submissions[-1] if record.submissions else None
        facts.append(
            RunFacts(
                run_id=record.run_id,
                job=job,
                submitted=last.time if last is not None else record.created,
                cancel_requested=last.cancel_requested if last is not None else None,
                attempt=attempt,
                now=time.time(),
            )
        )
    return facts


@dataclass(frozen=True)
class AttemptBeginning:
    """The newest attempt of a run: its number, its directory and its started.json."""

    number: int
    directory: PurePosixPath
    started: Started | None


def leaders_of(record: RunRecord, beginning: AttemptBeginning | None) -> list[ProcessIdentity]:
    """job.sh of the last submission, as recorded; where submit was cut off before that, as job.sh states itself."""
    jobs = record.submissions[-1].jobs if record.submissions else ()
    recorded = [ProcessIdentity(job.pid, job.pid_start_time, job.boot_id) for job in jobs if job.pid is not None]
    started = beginning.started if beginning is not None else None
    if recorded or started is None or started.pid is None:
        return recorded
    return [ProcessIdentity(started.pid, started.pid_start_time, started.boot_id)]


def newest_attempt(record: RunRecord, hands: RunHands) -> AttemptBeginning | None:
    """The last attempt of the run's last submission; None if it has made none yet."""
    return _find_attempts([record], hands)[0]


def is_elsewhere(beginning: AttemptBeginning | None, leaders: Sequence[ProcessIdentity], hands: RunHands) -> bool:
    """Whether a run was started on another machine, whose processes cannot be seen from this one.

    A job.sh that lives here settles it: a machine's name may have changed since.
    """
    report = hands.inspect_processes(leaders)
    return beginning is not None and not any(report.alive) and _is_other_host(beginning.started, report)


def attempt_numbers(record: RunRecord, hands: RunHands) -> list[int]:
    """Numbers of all attempts that a run has made, ascending."""
    (names,) = hands.list_names([str(record.run_dir / "attempts")])
    return sorted(int(name) for name in names if name.isdecimal())


def _find_attempts(records: Sequence[RunRecord], hands: RunHands) -> list[AttemptBeginning | None]:
    folders = [PurePosixPath(str(record.run_dir)) / "attempts" for record in records]
    names = hands.list_names([str(folder) for folder in folders])
    newest = [max((int(name) for name in group if name.isdecimal()), default=None) for group in names]
    found = [(folder / str(number), number) for folder, number in zip(folders, newest, strict=True)]
    parts = hands.read_parts([FileRead(str(folder / "started.json")) for folder, _ in found])
    return [
        _beginning(record, folder, number, part)
        for record, (folder, number), part in zip(records, found, parts, strict=True)
    ]


def _beginning(
    record: RunRecord, directory: PurePosixPath, number: int | None, part: FilePart | None
) -> AttemptBeginning | None:
    if number is None:
        return None
    started = parse_started(_data(part))
    submission = record.submissions[-1].number if record.submissions else None
    if started is not None and None not in (started.submission, submission) and started.submission != submission:
        return None  # of an earlier submission: the last one has made none yet
    return AttemptBeginning(number, directory, started)


def _read_attempts(beginnings: Sequence[AttemptBeginning | None], hands: RunHands) -> list[AttemptFacts | None]:
    present = [beginning for beginning in beginnings if beginning is not None]
    folders = [f"{one.directory}{name}" for one in present for name in ("", "/heartbeat", "/errors")]
    names = iter(hands.list_names(folders))
    listed = [(set(next(names)), _json_names(next(names)), _json_names(next(names))) for _ in present]
    reads = []
    for one, (_, beats, errors) in zip(present, listed, strict=True):
        files = ["exit.json", "outcome.json", *(f"heartbeat/{n}" for n in beats), *(f"errors/{n}" for n in errors)]
        reads += [FileRead(f"{one.directory}/{file}") for file in files]
    parts = iter(hands.read_parts(reads))
    facts = {}
    for one, (plain, beats, errors) in zip(present, listed, strict=True):
        ending, outcome = parse_ending(_data(next(parts))), parse_outcome(_data(next(parts)))
        heartbeats = [parse_heartbeat(_data(next(parts))) for _ in beats]
        failures = [parse_error(_data(next(parts))) for _ in errors]
        facts[id(one)] = AttemptFacts(
            number=one.number,
            started=one.started,
            ending=ending,
            outcome=outcome,
            cancel_marked="cancel" in plain,
            heartbeats=tuple(beat for beat in heartbeats if beat is not None),
            errors=tuple(sorted((e for e in failures if e is not None), key=lambda error: (error.time, error.rank))),
        )
    return [facts[id(one)] if one is not None else None for one in beginnings]


def _json_names(names: Sequence[str]) -> list[str]:
    # Names that begin with a dot are being written and renamed at this moment.
    return [name for name in names if name.endswith(".json") and not name.startswith(".")]


def _data(part: FilePart | None) -> bytes | None:
    return part.data if part is not None else None


def _process_answer(
    leaders: Sequence[ProcessIdentity], alive: Sequence[bool | None], report: ProcessReport, started: Started | None
) -> JobAnswer | None:
    """The job of a cluster without a scheduler: its job.sh, seen as a process."""
    if not leaders:
        return None
    pids = ", ".join(str(leader.pid) for leader in leaders)
    if any(alive):
        return JobAnswer(JobState.RUNNING, f"pid {pids}")
    if started is not None and _is_other_host(started, report):
        return JobAnswer(JobState.UNKNOWN, f"it was started on {started.host} and this is {report.host}: ask there")
    if None in alive:
        known = "its processes cannot be seen" if report.boot_id is None else "the pid may be another process's by now"
        return JobAnswer(JobState.UNKNOWN, f"job.sh was pid {pids}; {known}")
    if any(leader.boot_id is not None and leader.boot_id != report.boot_id for leader in leaders):
        return JobAnswer(JobState.NODE_FAIL, "the machine was restarted")
    return JobAnswer(JobState.FAILED, f"job.sh (pid {pids}) was killed (SIGKILL, or out of memory)")


def _is_other_host(started: Started | None, report: ProcessReport) -> bool:
    if started is None or started.host is None:
        return False
    return started.host.partition(".")[0].lower() != report.host.partition(".")[0].lower()
