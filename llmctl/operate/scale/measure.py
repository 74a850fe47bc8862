"""Submit the sizes of a scaling, follow them, and measure their steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from llmctl.context import ClusterSession, Context
from llmctl.errors import LlmctlError, ProfileError, RecordError, SchedulerError, SubmissionLost
from llmctl.job_state import JobState
from llmctl.operate.plot.histories import read_runs
from llmctl.operate.scale.kept import Scaling, ScalingFiles, SizeRun
from llmctl.operate.scale.plan import SizePlan
from llmctl.operate.scale.table import SizeState
from llmctl.operate.survey import RunSurvey, load_records
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RecordAbsent
from llmctl.runs.scheduler_query import INTERVAL_S
from llmctl.runs.series.steady import FIRST_ROWS, KEYS, steady_step
from llmctl.runs.view import RunView
from llmctl.submit.execute import execute_plan

_PAUSES_S = (0.2, 2.0)
"""Between two looks at the runs: at first, and at most."""


@dataclass(frozen=True)
class SizeSurvey:
    """Observes the runs of a scaling, once or repeatedly; the metrics of a completed run are read once."""

    survey: RunSurvey
    _steps: dict[str, float | None] = field(default_factory=dict)

    def look(self, scaling: Scaling) -> list[SizeState]:
        """The sizes whose runs are still there, with their measured steps.

        Raises:
            RecordError, ProfileError, SchedulerError: the metrics of a completed run cannot be read.
        """
        context = self.survey.context
        found = [(run, entry) for run in scaling.runs if (entry := _entry(context, run)) is not None]
        views = self.survey.look([entry for _, entry in found])
        return [
            self._state(run, entry, view)
            for (run, entry), view in zip(found, views, strict=True)
            if view.state is not JobState.UNKNOWN or not self._is_removed(entry)
        ]

    def _is_removed(self, entry: IndexEntry) -> bool:
        """True if the run's directory is gone: such a run would be waited for without end."""
        if entry.cluster in self.survey.unreachable:
            return False
        try:
            session = ClusterSession.of(self.survey.context, entry.cluster, f"run {entry.run_id}")
            (record,) = load_records([entry], session)
        except (ProfileError, SchedulerError):
            return False
        return isinstance(record, RecordAbsent)

    def _state(self, run: SizeRun, entry: IndexEntry, view: RunView) -> SizeState:
        if view.state is not JobState.COMPLETED:
            return SizeState(run, view.state, view.detail)
        if run.run_id not in self._steps:
            (history,) = read_runs(self.survey.context, [entry], KEYS).values()
            steady = steady_step(history)
            self._steps[run.run_id] = None if steady is None else steady.seconds
        step_s = self._steps[run.run_id]
        detail = view.detail if step_s is not None else f"has too few rows of metrics after the first {FIRST_ROWS}"
        return SizeState(run, view.state, detail, step_s)


def _entry(context: Context, run: SizeRun) -> IndexEntry | None:
    """The run in the index; None for one that its cluster never accepted, or that was forgotten."""
    try:
        entry = context.index.find(run.run_id)
    except RecordError:
        return None
    return entry if entry.run_id == run.run_id else None


def start(context: Context, scaling: Scaling, size: SizePlan) -> Scaling:
    """Submit a size; returns the scaling with its run, which is kept first: an interruption loses no run.

    Raises:
        LlmctlError: as a submission.
    """
    files, after = ScalingFiles(context.folders.state), scaling.with_run(size.run)
    files.save(after)
    try:
        execute_plan(size.plan, context)
    except SubmissionLost:
        raise  # the run stays, and a later look finds out
    except LlmctlError:
        files.save(scaling)
        raise
    return after


def follow(
    context: Context, scaling: Scaling, waiting: Sequence[SizePlan], sleep: Callable[[float], None] = time.sleep
) -> Iterator[list[SizeState]]:
    """The states of all sizes again and again, until all have ended.

    Args:
        context: this call of llmctl.
        scaling: with the submitted runs.
        waiting: sizes that are submitted one after the other, each when no run is going on.
        sleep: waits between two looks.

    Raises:
        LlmctlError: as a submission.
        SchedulerError: the cluster cannot be reached, and a later try cannot help.
    """
    sizes, left, pause_s = SizeSurvey(RunSurvey(context, interval_s=INTERVAL_S)), [*waiting], _PAUSES_S[0]
    while True:
        begun = sizes.look(scaling)
        for error in sizes.survey.unreachable.values():
            if not error.transient:
                raise error
        yield sorted([*begun, *(SizeState(size.run) for size in left)], key=lambda state: state.run.nodes)
        if not any(state.is_going for state in begun):
            if not left:
                return
            scaling = start(context, scaling, left.pop(0))
            pause_s = _PAUSES_S[0]
            continue
        sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])
