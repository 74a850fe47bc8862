"""One run read again and again for its page: its view, ranks, attempts, curves, and the log that follows."""

import math
from collections.abc import Callable

from llmctl.operate.follow import default_choice
from llmctl.operate.report.gather import Attempt, read_attempts
from llmctl.runs.attempts import DetailsMemory
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.log_selection import LogChoice, ranks_of_errors
from llmctl.runs.logs import LogFollower, LogLine, last_lines
from llmctl.runs.observe import observe_with_facts
from llmctl.runs.record import RunRecord
from llmctl.runs.series.columns import Columns
from llmctl.runs.series.curves import RunCurves, run_curves
from llmctl.runs.series.following import HistoryFollower
from llmctl.transport.protocol import Transport
from llmctl.watch.source import KEYS, RunPage

POINTS = 400
"""Points of a curve: two for each column of a wide terminal."""
LOG_LINES = 300
"""Last lines of a log that a page begins with."""
FEW_RANKS = 64
"""Ranks whose heartbeats are read each time; those of more ranks are read at the interval of ``DetailsMemory``."""


class RunReader:
    """Reads the pages of one run."""

    def __init__(
        self,
        load: Callable[[], RunRecord],
        transport: Transport,
        scheduler: SchedulerWatch | None,
    ) -> None:
        """Read through a transport.

        Args:
            load: loads the record, which a resume changes.
            transport: the machine of the run directory.
            scheduler: the cluster's scheduler; None where jobs are processes.
        """
        self._load = load
        self._transport = transport
        self._scheduler = scheduler
        self._memory: DetailsMemory | None = None
        self._metrics: HistoryFollower | None = None
        self._curves: RunCurves | None = None
        self._newest: dict[str, float] = {}
        self._attempts: tuple[Attempt, ...] = ()
        self._attempts_of: object = None
        self._follower = LogFollower(transport.read_parts)
        self._log_of: object = None
        self._has_ended = False
        self._sources: tuple[str, ...] = ()

    def read(self, choice: LogChoice | None) -> RunPage:
        """See OpenedRun."""
        record = self._load()
        ((view, facts),) = observe_with_facts([record], self._transport, self._scheduler, self._memory)
        attempt = facts.attempt
        heartbeats = attempt.heartbeats if attempt is not None else ()
        if self._memory is None and len(heartbeats) > FEW_RANKS:
            self._memory = DetailsMemory()
        # The files after the state: after the end, nothing is written that this page does not show.
        number = attempt.number if attempt is not None else None
        lines = self._new_lines(record, number, choice, is_last=view.state.is_finished)
        if self._attempts_of != (view.attempts, view.state):
            self._attempts = tuple(read_attempts(record, self._transport))
            self._attempts_of = (view.attempts, view.state)
        return RunPage(
            view,
            facts.now,
            facts.now - (attempt.heartbeats_age_s if attempt is not None else 0.0),
            tuple(sorted(heartbeats, key=lambda beat: beat.rank)),
            self._attempts,
            self._read_curves(record),
            self._newest,
            lines,
            ", ".join(self._sources),
        )

    def _read_curves(self, record: RunRecord) -> RunCurves:
        if self._metrics is None:
            self._metrics = HistoryFollower(f"{record.run_dir}/metrics.jsonl", self._transport.read_parts, KEYS)
        if self._metrics.poll() or self._curves is None:
            self._curves = run_curves(self._metrics.history, POINTS)
            self._newest = _newest(self._metrics.history.rows)
        return self._curves

    def _new_lines(
        self, record: RunRecord, attempt: int | None, choice: LogChoice | None, *, is_last: bool
    ) -> tuple[LogLine, ...]:
        folder = f"{record.run_dir}/attempts/{attempt or 0}"
        names, errors = self._transport.list_names([folder, f"{folder}/errors"])
        wanted = choice or default_choice(record, names)
        files = wanted.files(str(record.run_dir), attempt or 0, names, ranks_of_errors(errors))
        self._sources = tuple(files)
        offsets: dict[str, int] = {}
        first: list[LogLine] = []
        if self._log_of != (attempt, wanted):
            self._follower = LogFollower(self._transport.read_parts)
            self._log_of = (attempt, wanted)
            self._has_ended = False
            tails = last_lines(self._transport.read_parts, list(files.values()), LOG_LINES, whole_only=True)
            for source, (texts, end) in zip(files, tails, strict=True):
                first += [LogLine(source, text) for text in texts]
                offsets[source] = end
        self._follower.follow(files, offsets)
        lines = [*first, *self._follower.poll()]
        if is_last and not self._has_ended:
            lines += self._follower.flush()
        self._has_ended = is_last
        return tuple(lines)


def _newest(rows: Columns) -> dict[str, float]:
    """The last finite number of each key."""
    found = {key: next(filter(math.isfinite, reversed(column)), None) for key, column in rows.values.items()}
    return {key: value for key, value in found.items() if value is not None}
