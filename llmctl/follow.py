"""Following a run to its end: its log as it is written, its progress, and at last what became of it.

Everything is read from the run directory and, on this machine, from /proc; no scheduler is asked for a log line.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from llmctl.attempt_reader import newest_attempt
from llmctl.errors import INTERRUPTED, FollowedRunFailed, RecordError
from llmctl.file_reads import FileRead
from llmctl.follow_output import FollowOutput, choose_output
from llmctl.hands import Hands
from llmctl.job_state import JobState
from llmctl.log_choice import LogChoice, ranks_of_errors
from llmctl.logs import LogFollower, LogLine, rank_logs
from llmctl.metrics_reader import MetricsReader
from llmctl.run_observer import observe_run
from llmctl.run_record import RunRecord
from llmctl.run_view import RunView

POLL_S = 0.25
"""Between two looks at the log: quick enough to be called live."""
STATE_EVERY = 4
"""Looks at the log for one look at the run's state."""


def follow_run(
    record: RunRecord,
    hands: Hands,
    *,
    choice: LogChoice | None = None,
    attempt: int | None = None,
    offsets: Mapping[str, int] | None = None,
    output: FollowOutput | None = None,
) -> int:
    """Show a run's log until the run ends. Ctrl-C stops the showing and leaves the run alone.

    Args:
        record: of the run.
        hands: transport to where the run directory is.
        choice: the logs to show; None: rank 0, and before it writes, job.sh and the agent of node 0.
        attempt: that ``offsets`` are about; a later one is shown from its start.
        offsets: where to begin, by source; absent ones begin at their start.
        output: None: progress on a terminal, plain lines in a pipe.

    Returns:
        0 if the run completed; 130 after Ctrl-C, or when whoever read the output has left before the run ended.

    Raises:
        FollowedRunFailed: the run ended otherwise; names the first failing rank, its host and the cause.
    """
    output = output or choose_output(record.name, _train_iters(record))
    try:
        session = _Session(record, hands, choice, attempt, dict(offsets or {}), output)
        with output:
            view = session.run()
    except KeyboardInterrupt:
        output.remark(
            f"llmctl: no longer following; {record.run_id} goes on"
            f"\nfollow again: llmctl logs -f {record.run_id}   end it: llmctl cancel {record.run_id}"
        )
        return INTERRUPTED
    except BrokenPipeError:
        return INTERRUPTED
    return end_of_run(view)


def end_of_run(view: RunView) -> int:
    """0 for a run that completed.

    Raises:
        FollowedRunFailed: it ended otherwise; says how, and where to read on.
    """
    if view.state is JobState.COMPLETED:
        return 0
    source = "--rank failed" if view.detail.startswith("rank ") else "--job"
    more = "" if view.state is JobState.CANCELLED else f"\nread on: llmctl logs {view.run_id} {source}"
    raise FollowedRunFailed(f"{view.run_id} {view.state}: {view.detail}{more}")


class _Session:
    """One following of one run."""

    def __init__(
        self,
        record: RunRecord,
        hands: Hands,
        choice: LogChoice | None,
        attempt: int | None,
        offsets: dict[str, int],
        output: FollowOutput,
    ) -> None:
        self._record = record
        self._hands = hands
        self._choice = choice
        if len(record.submissions) > 1 and "job" not in offsets:
            # job.log goes on over submissions: what earlier ones left there is not this one's.
            (part,) = hands.read_parts([FileRead(f"{record.run_dir}/job.log", limit=0)])
            offsets["job"] = part.size if part is not None else 0
        self._offsets = offsets
        self._output = output
        self._follower = LogFollower(hands.read_parts)
        self._metrics = MetricsReader(f"{record.run_dir}/metrics.jsonl", hands.read_parts)
        self._attempt = attempt
        self._remarked = False
        self._has_prefix = False
        self._waits_for_rank_0 = False

    def run(self, sleep: Callable[[float], None] = time.sleep) -> RunView:
        """Follow until the run has ended; the view of its end."""
        self._metrics.skip_to_tail()
        while True:
            # First the state, then the files: after the end nothing is written that this round does not show.
            view = self._look_at_run()
            self._choose_files()
            for _ in range(STATE_EVERY):
                if self._waits_for_rank_0:
                    # The agent's log repeats what rank 0 writes: leave it the moment that rank 0 has a log of its own.
                    self._choose_files()
                self._show_new(view)
                if view.state.is_finished:
                    self._show([*self._follower.flush()])
                    return view
                sleep(POLL_S)

    def _look_at_run(self) -> RunView:
        with suppress(RecordError):
            self._record = RunRecord.load(self._record.run_dir)
        view = observe_run(self._record, self._hands)
        says = view.detail if view.state in (JobState.RUNNING, JobState.UNKNOWN) and view.detail != "starting" else ""
        if says and not self._remarked:
            self._output.remark(f"llmctl: {view.run_id} {view.state}: {says}")
        self._remarked = bool(says)
        return view

    def _choose_files(self) -> None:
        beginning = newest_attempt(self._record, self._hands)
        if beginning is None:
            return
        if self._attempt not in (None, beginning.number):
            self._output.remark(f"llmctl: attempt {beginning.number} of {self._record.run_id}")
            self._offsets = {}
        self._attempt = beginning.number
        names, errors = self._hands.list_names([str(beginning.directory), f"{beginning.directory}/errors"])
        choice = self._choice or default_choice(self._record, names)
        files = choice.files(str(self._record.run_dir), beginning.number, names, ranks_of_errors(errors))
        if self._choice is None and self._record.config is not None:
            files = {source: path for source, path in files.items() if source in ("rank 0", "node 0", "job")}
            self._waits_for_rank_0 = "rank 0" not in files
        else:
            self._has_prefix = self._has_prefix or len(files) > 1
        self._follower.follow(files, self._offsets)

    def _show_new(self, view: RunView) -> None:
        self._show(self._follower.poll())
        self._metrics.poll()
        self._output.progress(self._metrics.table, view.detail or view.state.value)

    def _show(self, lines: Sequence[LogLine]) -> None:
        self._output.show([str(line) if self._has_prefix else line.text for line in lines])


def default_choice(record: RunRecord, names: Sequence[str]) -> LogChoice:
    """What is shown where nobody says: rank 0; for a COMMAND, or before rank 0 writes, job.sh and the agents.

    Args:
        record: of the run.
        names: file names in the attempt's directory.
    """
    return LogChoice("ranks", (0,)) if record.config is not None and 0 in rank_logs(names) else LogChoice("job")


def _train_iters(record: RunRecord) -> int | None:
    value = (record.config or {}).get("training", {}).get("train_iters")
    return value if isinstance(value, int) else None
