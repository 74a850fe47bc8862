"""The user's runs on their clusters, as the source of the screen."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from llmctl.context import ClusterSession, Context
from llmctl.errors import LlmctlError
from llmctl.job_state import JobState
from llmctl.operate.survey import RunSurvey, choose_entries, has_finished
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import INTERVAL_S
from llmctl.transport.host_group import HostGroup
from llmctl.transport.protocol import Transport
from llmctl.watch.opened_run import RunReader
from llmctl.watch.source import ClusterLook, Listing


class ClusterRuns:
    """Runs of the index, read through the transports of their clusters.

    Every cluster has its own survey: one that does not answer keeps no other waiting.
    """

    def __init__(self, context: Context, references: Sequence[str] = (), cluster: str = "") -> None:
        """Watch the runs of a user.

        Args:
            context: this call of llmctl.
            references: run ids, their beginnings, names or job ids; empty: all runs.
            cluster: only runs of this cluster; empty: of all clusters.

        Raises:
            RecordError: a reference fits no run, or several.
            UsageError: no cluster has this name.
        """
        if cluster:
            context.profile(cluster)
        self._context = context
        self._cluster = cluster
        self._named = list(dict.fromkeys(context.index.find(reference).run_id for reference in references))
        self._entries: dict[str, IndexEntry] = {}
        self._surveys: dict[str, RunSurvey] = {}
        self._lock = threading.Lock()

    @property
    def only_run(self) -> str | None:
        """The run, if only one was asked for."""
        return self._named[0] if len(self._named) == 1 else None

    def connect(self) -> None:
        """Connect to the clusters of the runs that will be shown; must come before the screen, which cannot ask."""
        self._context = connect_first(self._context, self.list_runs(every=False).runs.values())

    def list_runs(self, *, every: bool) -> Listing:
        """See RunSource."""
        entries = [entry for entry in self._context.index.entries() if self._cluster in ("", entry.cluster)]
        known = {entry.run_id: entry for entry in entries}
        with self._lock:
            self._entries |= known
        if self._named:
            return Listing({run_id: known[run_id].cluster for run_id in self._named if run_id in known})
        chosen, hidden = choose_entries(entries, every=every)
        return Listing({entry.run_id: entry.cluster for entry in chosen}, hidden)

    def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
        """See RunSource."""
        with self._lock:
            entries = [self._entries[run_id] for run_id in run_ids if run_id in self._entries]
            survey = self._surveys.setdefault(cluster, RunSurvey(self._context, interval_s=INTERVAL_S))
        views = survey.look(entries, remember=not self._named)
        problem = survey.unreachable.get(cluster)
        return ClusterLook(tuple(views), problem.message if problem is not None else "")

    def open_run(self, run_id: str) -> RunReader:
        """See RunSource."""
        return _reader_of(self._context, self._context.index.find(run_id))


def connect_first(context: Context, clusters: Iterable[str]) -> Context:
    """Connect to clusters behind ssh, while the user can still be asked for a password.

    Returns:
        The context for the screen. A cluster out of reach has no connection yet, and a later one asks nothing.
    """
    for cluster in dict.fromkeys(clusters):
        with suppress(LlmctlError):
            transport = ClusterSession.of(context, cluster, "llmctl watch").transport
            if transport.is_remote:
                context.tell(f"connecting to {cluster}")
                if not _answers(transport):
                    context.connections.pop(cluster).close()
    return replace(context, asks=False)


def _answers(transport: Transport) -> bool:
    """True if the machine, or any host of a group, could be reached."""
    machines = [transport]
    if isinstance(transport, HostGroup):
        machines = [transport.transport_of(host) for host in transport.hosts]
    reached = []
    for one in machines:
        with suppress(LlmctlError):
            one.now()
            reached.append(one)
    return bool(reached)


def _reader_of(context: Context, entry: IndexEntry) -> RunReader:
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    seen = {}
    if has_finished(entry) and entry.last_seen is not None:
        seen[entry.run_id] = JobState(entry.last_state), entry.last_seen
    scheduler = session.watch(interval_s=INTERVAL_S, remembered=seen, asks_again=True)
    return RunReader(lambda: RunRecord.load(entry.run_dir, session.transport), session.transport, scheduler)
