"""Runs with what they used: node-hours of all attempts, and the site's points."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from llmctl.context import ClusterSession, Context
from llmctl.errors import LlmctlError, UsageError
from llmctl.job_state import JobState
from llmctl.operate.survey import RunSurvey, load_records
from llmctl.runs.attempts import MAX_STARTS
from llmctl.runs.costs.assess import assess, count_faults
from llmctl.runs.costs.attempt_files import read_attempt_files, read_attempts_of
from llmctl.runs.costs.save_interval import FaultCount
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RunRecord
from llmctl.runs.series.reading import MetricsSource, read_history
from llmctl.runs.time_used import seconds_used
from llmctl.runs.view import RunView
from llmctl.site.profile import ClusterProfile

MOST_METRICS = 32 << 20
"""Bytes of metrics.jsonl, some 70,000 rows, that the status of a run on this machine reads: a second on a busy core."""
MOST_SENT = 2 << 20
"""The same of a run on another machine, for each status sends them anew."""
FAULTS_OF_RUNS = 20
"""Newest runs whose faults count for the rate."""


class PastRunFacts(TypedDict):
    """Beside the fields of RunView."""

    run_dir: str
    """Directory of the run, on the cluster."""
    created: float
    """Time when the run was created, in seconds since 1970."""
    node_hours: float | None
    """Node-hours of all attempts; null if unknown."""
    points: float | None
    """Charge of all attempts, in the site's unit; null if the site has none, or if unknown."""
    unit: str | None
    """Unit of the points."""


@dataclass(frozen=True)
class PastRun:
    """One run, and what it has used.

    Attributes:
        entry: of the index.
        view: the run as last seen.
        nodes: number of nodes of its last submission; None if its record cannot be read.
        node_hours: of all attempts; None if unknown.
        points: in the site's units; None if the site has none, or if unknown.
        unit: of the points.
    """

    entry: IndexEntry
    view: RunView
    nodes: int | None = None
    node_hours: float | None = None
    points: float | None = None
    unit: str = ""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.entry.run_id

    def as_json(self) -> dict[str, Any]:
        """The view's fields and these, as plain values."""
        facts: PastRunFacts = {
            "run_dir": str(self.entry.run_dir),
            "created": self.entry.created,
            "node_hours": self.node_hours,
            "points": self.points,
            "unit": self.unit or None,
        }
        return {**self.view.as_json(), **facts}


def find_runs(
    context: Context,
    *,
    cluster: str | None = None,
    state: str | None = None,
    name: str | None = None,
    since: str | None = None,
    most: int | None = None,
) -> tuple[list[PastRun], int]:
    """Runs of the index, the newest first, and the number of runs left out because of ``most``.

    Args:
        context: this call of llmctl.
        cluster: only of this cluster.
        state: only in this state.
        name: only whose id contains this text.
        since: only created within, such as ``7d``.
        most: number of runs; None: all.

    Raises:
        UsageError: ``state`` or ``since`` is not valid.
    """
    states = [each.value for each in JobState]
    if state is not None and state not in states:
        raise UsageError(f"--state {state}: is unknown; the states are {', '.join(states)}")
    oldest = 0.0 if since is None else time.time() - _seconds(since)
    entries = [
        entry
        for entry in reversed(context.index.entries())
        if cluster in (None, entry.cluster) and (name or "") in entry.run_id and entry.created >= oldest
    ]
    count = len(entries) if most is None else most
    if state is None:
        return past_runs(context, entries[:count], RunSurvey(context)), len(entries[count:])
    found = [run for run in past_runs(context, entries, RunSurvey(context)) if run.view.state.value == state]
    return found[:count], len(found[count:])


def _seconds(text: str) -> int:
    from llmctl.site.job import JobError, parse_time

    try:
        return parse_time(text)
    except JobError as error:
        raise UsageError(f"--since {error.problem}") from None


def past_runs(context: Context, entries: Sequence[IndexEntry], survey: RunSurvey) -> list[PastRun]:
    """Runs with what they used, in order. Unknown for a cluster that is out of reach or has no profile any more."""
    views = dict(zip(entries, survey.look(entries, remember=True), strict=True))
    found: dict[IndexEntry, PastRun] = {}
    for cluster in dict.fromkeys(entry.cluster for entry in entries):
        group = [entry for entry in entries if entry.cluster == cluster]
        found |= {entry: PastRun(entry, views[entry]) for entry in group}
        if cluster in survey.unreachable:
            continue
        with suppress(LlmctlError):
            session = ClusterSession.of(context, cluster, f"run {group[0].run_id}")
            loaded = load_records(group, session)
            read = {entry: record for entry, record in zip(group, loaded, strict=True) if isinstance(record, RunRecord)}
            running = [views[entry].state is JobState.RUNNING for entry in read]
            used = seconds_used(list(read.values()), running, session.transport)
            for (entry, record), seconds in zip(read.items(), used, strict=True):
                found[entry] = _past_run(entry, views[entry], record, seconds, session.profile)
    return [found[entry] for entry in entries]


def with_costs(context: Context, entry: IndexEntry, view: RunView) -> RunView:
    """The view of a run with the costs of its attempts, from all rows of its metrics.

    Without them where its cluster or record cannot be read, or its metrics are longer than ``MOST_METRICS``, from
    another machine than ``MOST_SENT``.
    """
    with suppress(LlmctlError):
        session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
        (record,) = load_records([entry], session)
        if not isinstance(record, RunRecord) or not view.attempts:
            return view
        machine = session.transport
        source = MetricsSource(f"{record.run_dir}/metrics.jsonl", machine.read_parts, is_here=not machine.is_remote)
        if source.size > (MOST_SENT if machine.is_remote else MOST_METRICS):
            return view
        costs = assess(
            record,
            read_attempt_files(record, machine),
            read_history(source, ()).attempts,
            is_running=not view.state.is_finished,
            step_s=view.iteration_time_s,
            others=lambda: faults_of_others(context, entry, session),
        )
        return replace(view, costs=costs)
    return view


def faults_of_others(context: Context, entry: IndexEntry, session: ClusterSession) -> FaultCount:
    """Faults of the user's other runs on the cluster of a run, of those whose state was noted last.

    Raises:
        SchedulerError: the cluster cannot be reached.
    """
    others = [
        each
        for each in context.index.beginning_with("", FAULTS_OF_RUNS)
        if each.cluster == entry.cluster and each.run_id != entry.run_id
    ]
    records = [each for each in load_records(others, session) if isinstance(each, RunRecord)]
    attempts = read_attempts_of(records, session.transport, newest=MAX_STARTS)
    return sum(map(count_faults, records, attempts), FaultCount(0, 0.0))


def _past_run(entry: IndexEntry, view: RunView, record: RunRecord, seconds: float, profile: ClusterProfile) -> PastRun:
    job, cost = record.job, profile.cost
    nodes = int(job.get("nodes") or 1) + int(job.get("spare_nodes") or 0)
    hours = nodes * seconds / 3600
    resource = profile.resource_types.get(job.get("resource_type") or profile.defaults.resource_type or "")
    if resource is None or resource.points_per_hour is None:
        return PastRun(entry, view, nodes, hours)
    points = hours * resource.points_per_hour
    points *= cost.reserved_factor if job.get("reservation") else 1.0
    points *= cost.priority_factors.get(job.get("priority") or 0, 1.0)
    return PastRun(entry, view, nodes, hours, points, cost.unit)
