"""Runs with what they used: node-hours of all attempts, and the site's points."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from llmctl.context import ClusterSession, Context
from llmctl.errors import LlmctlError
from llmctl.job_state import JobState
from llmctl.operate.survey import RunSurvey, load_records
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RunRecord
from llmctl.runs.time_used import seconds_used
from llmctl.runs.view import RunView
from llmctl.site.profile import ClusterProfile


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


def _past_run(entry: IndexEntry, view: RunView, record: RunRecord, seconds: float, profile: ClusterProfile) -> PastRun:
    job, cost = record.job, profile.cost
    nodes = int(job.get("nodes") or 1)
    hours = nodes * seconds / 3600
    resource = profile.resource_types.get(job.get("resource_type") or profile.defaults.resource_type or "")
    if resource is None or resource.points_per_hour is None:
        return PastRun(entry, view, nodes, hours)
    points = hours * resource.points_per_hour
    points *= cost.reserved_factor if job.get("reservation") else 1.0
    points *= cost.priority_factors.get(job.get("priority") or 0, 1.0)
    return PastRun(entry, view, nodes, hours, points, cost.unit)
