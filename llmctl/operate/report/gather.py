"""All facts about the runs of a report, read through the transports of their clusters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError
from llmctl.operate.history import PastRun, faults_of_others, past_runs
from llmctl.operate.report.secret_words import secret_values
from llmctl.operate.survey import RunSurvey, load_records
from llmctl.runs.costs.assess import assess
from llmctl.runs.costs.attempt_files import AttemptFiles, read_attempt_files
from llmctl.runs.costs.time_split import RunCosts
from llmctl.runs.facts import Heartbeat, parse_heartbeat
from llmctl.runs.index import IndexEntry
from llmctl.runs.logs import last_lines, node_logs, rank_logs
from llmctl.runs.record import RunRecord
from llmctl.runs.series.curves import RunCurves, run_curves
from llmctl.runs.series.history import AttemptRows
from llmctl.runs.series.reading import MetricsSource, read_histories
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.protocol import Transport

if TYPE_CHECKING:
    from llmctl.operate.comparison.planned import Planned

KEYS = ("*_loss", "grad_norm", "params_norm", "learning_rate", "tokens_per_s", "mfu", "peak_memory_bytes")
"""Keys of metrics.jsonl that the page draws."""
LOG_LINES = 40
"""Last lines of a log: a traceback with the message before it."""
FAILED_WITH_LOG = 3
"""Newest failed attempts of a run whose logs the page has."""
MOST_RANKS = 1024
"""Ranks whose memory the page has: more make a table that nobody reads."""
_SMALL = 16 * 1024


@dataclass(frozen=True)
class Attempt(AttemptFiles):
    """One attempt: its files, and the end of the log that tells most about a failure.

    Attributes:
        log_name: source of the log, such as ``rank 3``; empty without a log.
        log: its last lines.
    """

    log_name: str = ""
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportedRun:
    """One run of a report.

    Attributes:
        record: of the run.
        past: its state, and what it has used.
        attempts: all of them, in order.
        heartbeats: the last ones of the ranks of the newest attempt, by rank.
        curves: of its metrics.
        costs: of its attempts.
        planned: the predicted run, or the reason why there is none; None for a COMMAND.
        secrets: value -> name of what the page must not show.
    """

    record: RunRecord
    past: PastRun
    attempts: tuple[Attempt, ...]
    heartbeats: tuple[Heartbeat, ...]
    curves: RunCurves
    costs: RunCosts
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
    from llmctl.operate.comparison.planned import plan_of

    attempts = tuple(read_attempts(record, session.transport))
    costs = assess(
        record,
        attempts,
        trained,
        is_running=not past.view.state.is_finished,
        step_s=past.view.iteration_time_s,
        others=lambda: faults_of_others(context, past.entry, session),
    )
    secrets = secret_values(record.job, context.environment)
    heartbeats = read_heartbeats(record, attempts[-1].number, session.transport) if attempts else ()
    planned = plan_of(context, session, record)
    return ReportedRun(record, past, attempts, heartbeats, curves, costs, planned, secrets)


def read_heartbeats(record: RunRecord, attempt: int, transport: Transport) -> tuple[Heartbeat, ...]:
    """The last heartbeats of an attempt's ranks, of at most ``MOST_RANKS``, by rank. Costs two round trips."""
    folder = f"{record.run_dir}/attempts/{attempt}/heartbeat"
    (names,) = transport.list_names([folder])
    files = sorted(name for name in names if name.startswith("rank-"))[:MOST_RANKS]
    parts = transport.read_parts([FileRead(f"{folder}/{name}", limit=_SMALL) for name in files])
    found = [beat for part in parts if (beat := parse_heartbeat(_data(part))) is not None]
    return tuple(sorted(found, key=lambda beat: beat.rank))


def read_attempts(record: RunRecord, transport: Transport) -> Iterator[Attempt]:
    """All attempts of a run, with the ends of the logs of the newest failed ones. Costs four round trips."""
    found = read_attempt_files(record, transport)
    logs = [_log_of(files, f"{record.run_dir}/attempts/{files.number}") for files in found if files.has_failed]
    logs = logs[-FAILED_WITH_LOG:]
    tails = last_lines(transport.read_parts, [path for _, _, path in logs], LOG_LINES, whole_only=False)
    shown = {number: (name, lines) for (number, name, _), (lines, _) in zip(logs, tails, strict=True)}
    for files in found:
        name, lines = shown.get(files.number, ("", []))
        own = {each.name: getattr(files, each.name) for each in fields(files)}
        yield Attempt(**own, log_name=name if lines else "", log=tuple(lines))


def _log_of(attempt: AttemptFiles, folder: str) -> tuple[int, str, str]:
    """Number of the attempt, source and path of the log that tells most: of the rank that failed first, or rank 0."""
    ranks, nodes = rank_logs(attempt.names), node_logs(attempt.names)
    rank = attempt.error.rank if attempt.error is not None and attempt.error.rank in ranks else min(ranks, default=None)
    if rank is not None:
        return attempt.number, f"rank {rank}", f"{folder}/{ranks[rank]}"
    if nodes:
        node = min(nodes)
        return attempt.number, f"node {node}", f"{folder}/{nodes[node]}"
    return attempt.number, "job", f"{folder}/../../job.log"


def _data(part: FilePart | None) -> bytes | None:
    return part.data if part is not None else None
