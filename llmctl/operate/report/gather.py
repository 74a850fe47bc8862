"""All facts about the runs of a report, read through the transports of their clusters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError
from llmctl.operate.history import PastRun, past_runs
from llmctl.operate.report.secret_words import secret_values
from llmctl.operate.survey import RunSurvey, load_records
from llmctl.runs.facts import (
    Ending,
    Heartbeat,
    Outcome,
    RankError,
    Started,
    first_error,
    parse_ending,
    parse_error,
    parse_heartbeat,
    parse_hostfile,
    parse_outcome,
    parse_started,
)
from llmctl.runs.index import IndexEntry
from llmctl.runs.log_selection import ranks_of_errors
from llmctl.runs.logs import last_lines, node_logs, rank_logs
from llmctl.runs.record import RunRecord
from llmctl.runs.series.curves import RunCurves, run_curves
from llmctl.runs.series.history import AttemptRows
from llmctl.runs.series.reading import MetricsSource, read_histories
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.protocol import Transport

if TYPE_CHECKING:
    from llmctl.operate.report.planned import Planned

KEYS = ("*_loss", "grad_norm", "params_norm", "learning_rate", "tokens_per_s", "mfu", "peak_memory_bytes")
"""Keys of metrics.jsonl that the page draws."""
LOG_LINES = 40
"""Last lines of a log: a traceback with the message before it."""
FAILED_WITH_LOG = 3
"""Newest failed attempts of a run whose logs the page has."""
MOST_ERRORS = 64
"""Errors of ranks that are read of an attempt: all of them, unless a whole large job lost its connections."""
MOST_RANKS = 1024
"""Ranks whose memory the page has: more make a table that nobody reads."""
_SMALL = 16 * 1024
_GOOD = ("completed", "stopped", "cancelled", "timeout")


@dataclass(frozen=True)
class Attempt:
    """One attempt: its files, and the end of the log that tells most about a failure.

    Attributes:
        log_name: source of the log, such as ``rank 3``; empty without a log.
        log: its last lines.
    """

    number: int
    started: Started | None
    ending: Ending | None
    outcome: Outcome | None
    hosts: tuple[str, ...]
    error: RankError | None
    log_name: str = ""
    log: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """True if the attempt ended badly, or left an error."""
        if self.ending is None:
            return self.error is not None
        return self.ending.reason not in _GOOD and self.ending.code != 0


@dataclass(frozen=True)
class ReportedRun:
    """One run of a report.

    Attributes:
        record: of the run.
        past: its state, and what it has used.
        attempts: all of them, in order.
        heartbeats: the last ones of the ranks of the newest attempt, by rank.
        curves: of its metrics.
        trained: number of an attempt -> its rows of training.
        planned: the predicted run, or the reason why there is none; None for a COMMAND.
        secrets: value -> name of what the page must not show.
    """

    record: RunRecord
    past: PastRun
    attempts: tuple[Attempt, ...]
    heartbeats: tuple[Heartbeat, ...]
    curves: RunCurves
    trained: Mapping[int, AttemptRows]
    planned: "Planned | str | None"
    secrets: dict[str, str]


def gather_runs(context: Context, entries: Sequence[IndexEntry]) -> list[ReportedRun]:
    """The runs of a report, in order.

    Raises:
        RecordError: the record of a run cannot be read.
        ProfileError: the cluster of a run has no profile any more.
        SchedulerError: a cluster cannot be reached.
    """
    survey = RunSurvey(context)
    past = past_runs(context, entries, survey)
    if survey.unreachable:
        raise next(iter(survey.unreachable.values()))
    sessions = {entry.cluster: ClusterSession.of(context, entry.cluster, f"run {entry.run_id}") for entry in entries}
    records = []
    for entry in entries:
        (record,) = load_records([entry], sessions[entry.cluster])
        if isinstance(record, RecordError):
            raise record
        records.append(record)
    machines = [sessions[entry.cluster].transport for entry in entries]
    sources = [
        MetricsSource(f"{record.run_dir}/metrics.jsonl", machine.read_parts, is_here=not machine.is_remote)
        for record, machine in zip(records, machines, strict=True)
    ]
    metrics = [(run_curves(history), history.attempts) for history in read_histories(sources, KEYS)]
    return [
        _reported(context, sessions[run.entry.cluster], record, run, *found)
        for run, record, found in zip(past, records, metrics, strict=True)
    ]


def _reported(
    context: Context,
    session: ClusterSession,
    record: RunRecord,
    past: PastRun,
    curves: RunCurves,
    trained: Mapping[int, AttemptRows],
) -> ReportedRun:
    from llmctl.operate.report.planned import plan_of

    attempts = tuple(read_attempts(record, session.transport))
    secrets = secret_values(record.job, context.environment)
    heartbeats = read_heartbeats(record, attempts[-1].number, session.transport) if attempts else ()
    return ReportedRun(record, past, attempts, heartbeats, curves, trained, plan_of(context, session, record), secrets)


def read_heartbeats(record: RunRecord, attempt: int, transport: Transport) -> tuple[Heartbeat, ...]:
    """The last heartbeats of an attempt's ranks, of at most ``MOST_RANKS``, by rank. Costs two round trips."""
    folder = f"{record.run_dir}/attempts/{attempt}/heartbeat"
    (names,) = transport.list_names([folder])
    files = sorted(name for name in names if name.startswith("rank-"))[:MOST_RANKS]
    parts = transport.read_parts([FileRead(f"{folder}/{name}", limit=_SMALL) for name in files])
    found = [beat for part in parts if (beat := parse_heartbeat(_data(part))) is not None]
    return tuple(sorted(found, key=lambda beat: beat.rank))


def read_attempts(record: RunRecord, transport: Transport) -> Iterator[Attempt]:
    """All attempts of a run, with the ends of the logs of the newest failed ones. Costs five round trips."""
    (names,) = transport.list_names([f"{record.run_dir}/attempts"])
    numbers = sorted(int(name) for name in names if name.isdecimal())
    if not numbers:
        return
    folders = [f"{record.run_dir}/attempts/{number}" for number in numbers]
    listed = transport.list_names([f"{folder}{name}" for folder in folders for name in ("", "/errors")])
    failed = [ranks_of_errors(errors)[:MOST_ERRORS] for errors in listed[1::2]]
    reads = []
    for folder, ranks in zip(folders, failed, strict=True):
        reads += [
            FileRead(f"{folder}/{name}", limit=_SMALL)
            for name in ("started.json", "exit.json", "outcome.json", "hostfile")
        ]
        reads += [FileRead(f"{folder}/errors/rank-{rank:05d}.json") for rank in ranks]
    parts = iter(transport.read_parts(reads))
    attempts = []
    for number, ranks in zip(numbers, failed, strict=True):
        started, ending, outcome, hosts = (_data(next(parts)) for _ in range(4))
        errors = [error for _ in ranks if (error := parse_error(_data(next(parts)))) is not None]
        attempts.append(
            Attempt(
                number,
                parse_started(started),
                parse_ending(ending),
                parse_outcome(outcome),
                parse_hostfile(hosts),
                first_error(tuple(errors)),
            )
        )
    logs = [
        _log_of(attempt, folder, present)
        for attempt, folder, present in zip(attempts, folders, listed[::2], strict=True)
        if attempt.has_failed
    ][-FAILED_WITH_LOG:]
    tails = last_lines(transport.read_parts, [path for _, _, path in logs], LOG_LINES, whole_only=False)
    shown = {number: (name, lines) for (number, name, _), (lines, _) in zip(logs, tails, strict=True)}
    for attempt in attempts:
        name, lines = shown.get(attempt.number, ("", []))
        yield replace(attempt, log_name=name if lines else "", log=tuple(lines))


def _log_of(attempt: Attempt, folder: str, names: Sequence[str]) -> tuple[int, str, str]:
    """Number of the attempt, source and path of the log that tells most: of the rank that failed first, or rank 0."""
    ranks, nodes = rank_logs(names), node_logs(names)
    rank = attempt.error.rank if attempt.error is not None and attempt.error.rank in ranks else min(ranks, default=None)
    if rank is not None:
        return attempt.number, f"rank {rank}", f"{folder}/{ranks[rank]}"
    if nodes:
        node = min(nodes)
        return attempt.number, f"node {node}", f"{folder}/{nodes[node]}"
    return attempt.number, "job", f"{folder}/../../job.log"


def _data(part: FilePart | None) -> bytes | None:
    return part.data if part is not None else None
