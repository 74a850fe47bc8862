"""Views of many runs, cluster by cluster. Runs out of reach keep their last seen state."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llmctl.context import ClusterSession, Context
from llmctl.durations import duration_text
from llmctl.errors import LlmctlError, ProfileError, RecordError, SchedulerError, WaitTimeout
from llmctl.job_state import JobState
from llmctl.runs.attempts import DetailsMemory
from llmctl.runs.index import IndexEntry
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.observe import observe_runs
from llmctl.runs.record import RecordAbsent, RunRecord
from llmctl.runs.record import load_records as load_run_records
from llmctl.runs.view import RunView
from llmctl.site.profile_names import cluster_names

_FINISHED = frozenset(state.value for state in JobState if state.is_finished)
RECENT = 10
"""Number of ended runs shown among those that have not ended."""
SEEN_EVERY_S = 600.0
"""The index records an unchanged state this often, and a changed state at once."""
WAIT_PAUSES_S = (0.1, 2.0)
"""Between two looks at a run that is waited for: at first, and at most."""
AWAY_S = 60.0
"""Repeated observation retries an unreachable cluster after this time, without delaying other clusters."""


@dataclass
class RunSurvey:
    """Observes runs, once or repeatedly.

    Attributes:
        context: this call of llmctl.
        interval_s: shortest time between two queries of a scheduler; in between, the last answer is used.
        unreachable: cluster -> error, from the last observation.
    """

    context: Context
    interval_s: float = 0.0
    unreachable: dict[str, SchedulerError] = field(default_factory=dict)
    _sessions: dict[str, tuple[ClusterSession, SchedulerWatch | None]] = field(default_factory=dict)
    _away_until: dict[str, tuple[float, SchedulerError]] = field(default_factory=dict)
    _memory: DetailsMemory = field(default_factory=DetailsMemory)
    _ended: dict[str, RunView] = field(default_factory=dict)

    def look(self, entries: Sequence[IndexEntry], *, remember: bool = False) -> list[RunView]:
        """Views of runs, in order; the index stores the observed states.

        Args:
            entries: the runs.
            remember: trust the index about ended runs, and do not query their scheduler again.
        """
        self.unreachable = {}
        open_ones = [entry for entry in entries if entry.run_id not in self._ended]
        views = dict(self._ended)
        for cluster in dict.fromkeys(entry.cluster for entry in open_ones):
            group = [entry for entry in open_ones if entry.cluster == cluster]
            views.update(zip((entry.run_id for entry in group), self._observe(cluster, group, remember), strict=True))
        self._ended = {run_id: view for run_id, view in views.items() if view.state.is_finished}
        return [views[entry.run_id] for entry in entries]

    def _observe(self, cluster: str, entries: Sequence[IndexEntry], remember: bool) -> list[RunView]:
        until, away = self._away_until.get(cluster, (0.0, None))
        try:
            if away is not None and time.monotonic() < until:
                raise away
            session, scheduler = self._session(cluster, entries, remember)
            loaded = load_records(entries, session)
            records = [record for record in loaded if isinstance(record, RunRecord)]
            seen = iter(observe_runs(records, session.transport, scheduler, self._memory))
        except SchedulerError as error:
            self.unreachable[cluster] = error
            if self.interval_s and error is not away:
                self._away_until[cluster] = (time.monotonic() + AWAY_S, error)
            # The full message appears once, below all runs; a run's own line stays one line.
            why = f"{cluster} cannot be reached: {error.message.splitlines()[0]}"
            return [_last_seen(entry, why) for entry in entries]
        except ProfileError as error:
            return [_without_profile(entry, error, self.context) for entry in entries]
        except LlmctlError as error:
            return [_unknown(entry, error.message) for entry in entries]
        views, ended = [], []
        for entry, record in zip(entries, loaded, strict=True):
            if isinstance(record, RecordError):
                views.append(_without_record(entry, record, self.context))
                continue
            views.append(next(seen))
            self._note(entry, views[-1])
            if views[-1].state.is_finished and not has_finished(entry):
                ended.append(record)
        with suppress(SchedulerError):
            session.remove_secrets(self.context, ended)
        return views

    def _session(
        self, cluster: str, entries: Sequence[IndexEntry], remember: bool
    ) -> tuple[ClusterSession, SchedulerWatch | None]:
        if cluster not in self._sessions:
            session = ClusterSession.of(self.context, cluster, f"run {entries[0].run_id}")
            known = {
                entry.run_id: (JobState(entry.last_state), entry.last_seen)
                for entry in entries
                if has_finished(entry) and entry.last_seen is not None
            }
            self._sessions[cluster] = (
                session,
                session.watch(interval_s=self.interval_s, remembered=known, asks_again=not remember),
            )
        return self._sessions[cluster]

    def _note(self, entry: IndexEntry, view: RunView) -> None:
        now = time.time()
        is_old = not view.state.is_finished and now - (entry.last_seen or 0.0) > SEEN_EVERY_S
        if entry.last_state != view.state.value or is_old:
            self.context.index.update_state(entry.run_id, view.state.value, now)


def wait_for_end(
    survey: RunSurvey, entry: IndexEntry, timeout_s: float | None, sleep: Callable[[float], None]
) -> RunView:
    """Look at a run until it has ended; returns its last view.

    Args:
        survey: of a repeated observation, which has an interval.
        entry: the run.
        timeout_s: seconds to wait; None: without a limit.
        sleep: waits between two looks.

    Raises:
        WaitTimeout: the run has not ended in this time.
        SchedulerError: the cluster cannot be reached, and a later try cannot help.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = WAIT_PAUSES_S[0]
    while True:
        (view,) = survey.look([entry])
        if view.state.is_finished:
            return view
        for error in survey.unreachable.values():
            if not error.transient:
                raise error
        left_s = pause_s if end is None else end - time.monotonic()
        if timeout_s is not None and left_s <= 0:
            raise WaitTimeout(f"{view.run_id} has not ended after {timeout_s:g} s: {view.summary}")
        sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, WAIT_PAUSES_S[1])


def choose_entries(entries: Sequence[IndexEntry], *, every: bool) -> tuple[list[IndexEntry], int]:
    """The runs that a screen shows, newest first, and the number of runs that ended too long ago.

    Args:
        entries: of the index, oldest first.
        every: also show these.
    """
    newest_first = list(reversed(entries))
    if every:
        return newest_first, 0
    hidden = {entry.run_id for entry in [entry for entry in newest_first if has_finished(entry)][RECENT:]}
    return [entry for entry in newest_first if entry.run_id not in hidden], len(hidden)


def has_finished(entry: IndexEntry) -> bool:
    """True if a run had ended when last seen."""
    return entry.last_state in _FINISHED


def load_records(entries: Sequence[IndexEntry], session: ClusterSession) -> list[RunRecord | RecordError]:
    """Records of runs of one cluster, in order; an error for each unreadable record."""
    return load_run_records([entry.run_dir for entry in entries], session.transport)


def _without_record(entry: IndexEntry, error: RecordError, context: Context) -> RunView:
    detail = error.message + (f"; last seen {entry.last_state}" if entry.last_state else "")
    if isinstance(error, RecordAbsent):
        detail += f"; to forget the run, remove {context.index.folder / entry.run_id}.json"
    return _unknown(entry, detail)


def _without_profile(entry: IndexEntry, error: ProfileError, context: Context) -> RunView:
    """The state of an ended run, which cannot change; a hint at the profile for any other run."""
    if has_finished(entry):
        return _view(entry, JobState(entry.last_state), "")
    path = context.folders.clusters / f"{entry.cluster}.yaml"
    hint = error.message.splitlines()[0]
    if entry.cluster not in cluster_names(context.folders):
        hint = f"no cluster is called {entry.cluster!r} any more; put its profile back to {path}"
    return _unknown(entry, hint + (f"; last seen {entry.last_state}" if entry.last_state else ""))


def _last_seen(entry: IndexEntry, reason: str) -> RunView:
    """The last seen state from the index, with its age."""
    if entry.last_state is None or entry.last_seen is None:
        return _unknown(entry, reason)
    state = JobState(entry.last_state) if entry.last_state in {one.value for one in JobState} else JobState.UNKNOWN
    return _view(entry, state, f"as seen {duration_text(time.time() - entry.last_seen)} ago; {reason}")


def _unknown(entry: IndexEntry, detail: str) -> RunView:
    return _view(entry, JobState.UNKNOWN, detail)


def _view(entry: IndexEntry, state: JobState, detail: str) -> RunView:
    empty: dict[str, Any] = dict.fromkeys(RunView.__dataclass_fields__)
    known = {"run_id": entry.run_id, "name": entry.name, "cluster": entry.cluster, "job_ids": entry.job_ids}
    return RunView(**{**empty, **known, "attempts": 0, "hosts": (), "state": state, "detail": detail})
