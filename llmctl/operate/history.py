"""Runs with what they used: node-hours of all attempts, and the site's points."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

from llmctl.context import ClusterSession, Context
from llmctl.errors import LlmctlError, UsageError
from llmctl.job_state import JobState
from llmctl.operate.survey import RunSurvey, load_records
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RunRecord
from llmctl.runs.time_used import seconds_used
from llmctl.runs.view import RunView
from llmctl.site.profile import ClusterProfile


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
