"""Follow a run to its end: new log lines, progress and the final state.

Everything is read from the run directory. The scheduler is never asked for log lines, and at most every half minute for
the run's state. Lost connections and silent schedulers do not end the following.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from llmctl.backends.base import QueueBackend
from llmctl.durations import duration_text
from llmctl.errors import INTERRUPTED, FollowedRunFailed, RecordError, SchedulerError
from llmctl.job_state import JobState
from llmctl.operate.follow_output import FollowOutput, choose_output
from llmctl.runs.attempts import DetailsMemory, newest_attempt
from llmctl.runs.hang import KERNEL_BUILD
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.log_selection import LogChoice, ranks_of_errors
from llmctl.runs.logs import LogFollower, LogLine, rank_logs
from llmctl.runs.metrics import MetricsReader
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import INTERVAL_S
from llmctl.runs.view import RunView
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

POLL_S = 0.25
"""Seconds between polls of the log on this machine: short enough to look live."""
REMOTE_POLL_S = (1.0, 3.0)
"""Seconds between polls over a connection: while lines come, and at most."""
STATE_EVERY = 4
"""Polls of the log per query of the run's state."""
RECONNECT_S = (1.0, 30.0)
"""Seconds before a lost connection is retried: at first, and at most."""
SETTLE_S = 3.0
"""Wait after the end, until a network file system shows the last lines: NFS clients cache attributes for 3 s (nfs(5),
acregmin)."""


def follow_run(
    record: RunRecord,
    transport: Transport,
    *,
    backend: QueueBackend | None = None,
    choice: LogChoice | None = None,
    attempt: int | None = None,
    offsets: Mapping[str, int] | None = None,
    output: FollowOutput | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show a run's log until the run ends. Ctrl-C stops the display; the run continues.

    Args:
        record: the run's record.
        transport: the machine of the run directory.
        backend: the scheduler's backend; None where jobs are processes.
        choice: the logs to show; None: rank 0, and until its first line, job.sh and the agent of node 0.
        attempt: the attempt of ``offsets``; later attempts are shown from their start.
        offsets: start offset by source; a missing source begins at its start.
        output: None: progress on a terminal, plain lines in a pipe.
        sleep: waits between polls.

    Returns:
        0 if the run completed; 130 after Ctrl-C, or if the reader of the output left before the run ended.

    Raises:
        FollowedRunFailed: the run did not complete; names the first failing rank, its host and the cause.
    """
    output = output or choose_output(record.name, _train_iters(record))
    try:
        session = _Session(record, transport, backend, choice, attempt, dict(offsets or {}), output)
        with output:
            view = session.run(sleep)
    except KeyboardInterrupt:
        output.warning(
            f"llmctl: no longer following; {record.run_id} continues"
            f"\nfollow again: llmctl logs -f {record.run_id}   end it: llmctl cancel {record.run_id}"
        )
        return INTERRUPTED
    except BrokenPipeError:
        return INTERRUPTED
    return end_of_run(view)


def end_of_run(view: RunView) -> int:
    """Exit code 0 for a completed run.

    Raises:
        FollowedRunFailed: the run did not complete; says how it ended, and which log to read.
    """
    if view.state is JobState.COMPLETED:
        return 0
    source = "--rank failed" if view.detail.startswith("rank ") else "--job"
    more = "" if view.state is JobState.CANCELLED else f"\nsee: llmctl logs {view.run_id} {source}"
    raise FollowedRunFailed(f"{view.run_id} {view.summary}{more}")


class _Session:
    """The following of one run."""

    def __init__(
        self,
        record: RunRecord,
        transport: Transport,
        backend: QueueBackend | None,
        choice: LogChoice | None,
        attempt: int | None,
        offsets: dict[str, int],
        output: FollowOutput,
    ) -> None:
        self._record = record
        self._transport = transport
        self._scheduler = SchedulerWatch(backend, transport, interval_s=INTERVAL_S) if backend else None
        self._choice = choice
        if len(record.submissions) > 1 and "job" not in offsets:
            # job.log continues over submissions: skip the lines of earlier ones.
            (part,) = transport.read_parts([FileRead(f"{record.run_dir}/job.log", limit=0)])
            offsets["job"] = part.size if part is not None else 0
        self._offsets = offsets
        self._output = output
        self._follower = LogFollower(transport.read_parts)
        self._metrics = MetricsReader(f"{record.run_dir}/metrics.jsonl", transport.read_parts)
        self._memory = DetailsMemory()
        self._attempt = attempt
        self._has_metrics = False
        self._with_warning = ""
        self._pause_s = REMOTE_POLL_S[0] if transport.is_remote else POLL_S
        self._has_prefix = False
        self._waits_for_rank_0 = False

    def run(self, sleep: Callable[[float], None]) -> RunView:
        """Follow until the run has ended; returns the final view.

        Raises:
            SchedulerError: the connection was lost, and a retry cannot help.
        """
        wait_s = 0.0
        while True:
            try:
                view = self._round(sleep)
            except SchedulerError as error:
                if not error.transient:
                    raise
                if not wait_s:
                    self._output.warning(
                        f"llmctl: connection lost: {error.message}; {self._record.run_id} is not touched"
                    )
                wait_s = min(2 * wait_s, RECONNECT_S[1]) or RECONNECT_S[0]
                sleep(wait_s)
                continue
            if wait_s:
                self._output.warning(f"llmctl: connected again to {self._transport.host}")
                wait_s = 0.0
            if view.state.is_finished:
                return view

    def _round(self, sleep: Callable[[float], None]) -> RunView:
        # State first, then files: after the end, nothing is written that this round does not show.
        view = self._observe_run()
        self._choose_files()
        if self._output.shows_progress:
            if not self._has_metrics:
                self._metrics.skip_to_tail()
                self._has_metrics = True
            self._metrics.poll()
            self._output.progress(self._metrics.table, view.detail or view.state.value)
        for _ in range(STATE_EVERY):
            if self._waits_for_rank_0:
                # The agent's log repeats rank 0's output: drop it as soon as rank 0 has a log file.
                self._choose_files()
            came = self._show_new()
            if view.state.is_finished:
                if self._scheduler is not None or self._transport.is_remote:
                    sleep(SETTLE_S)
                    self._show_new()
                self._show([*self._follower.flush()])
                return view
            if self._transport.is_remote:
                self._pause_s = REMOTE_POLL_S[0] if came else min(1.5 * self._pause_s, REMOTE_POLL_S[1])
            sleep(self._pause_s)
        return view

    def _observe_run(self) -> RunView:
        with suppress(RecordError):
            self._record = RunRecord.load(self._record.run_dir, self._transport)
        view = observe_run(self._record, self._transport, self._scheduler, self._memory)
        about, words = _warning(view, self._scheduler is not None, self._transport.now())
        if about and about != self._with_warning:
            self._output.warning(f"llmctl: {view.run_id} {words}")
        self._with_warning = about
        return view

    def _choose_files(self) -> None:
        beginning = newest_attempt(self._record, self._transport)
        if beginning is None:
            return
        if self._attempt not in (None, beginning.number):
            self._output.warning(f"llmctl: attempt {beginning.number} of {self._record.run_id}")
            self._offsets = {}
        self._attempt = beginning.number
        names, errors = self._transport.list_names([str(beginning.directory), f"{beginning.directory}/errors"])
        choice = self._choice or default_choice(self._record, names)
        files = choice.files(str(self._record.run_dir), beginning.number, names, ranks_of_errors(errors))
        if self._choice is None and self._record.config is not None:
            files = {source: path for source, path in files.items() if source in ("rank 0", "node 0", "job")}
            self._waits_for_rank_0 = "rank 0" not in files
        else:
            self._has_prefix = self._has_prefix or len(files) > 1
        self._follower.follow(files, self._offsets)

    def _show_new(self) -> bool:
        """Show new lines; True if there were any."""
        lines = self._follower.poll()
        self._show(lines)
        return bool(lines)

    def _show(self, lines: Sequence[LogLine]) -> None:
        self._output.show([str(line) if self._has_prefix else line.text for line in lines])


def default_choice(record: RunRecord, names: Sequence[str]) -> LogChoice:
    """The default log choice: rank 0; for a COMMAND, or before rank 0's first line, job.sh and the agents.

    Args:
        record: the run's record.
        names: file names in the attempt's directory.
    """
    return LogChoice("ranks", (0,)) if record.config is not None and 0 in rank_logs(names) else LogChoice("job")


def pending_words(view: RunView, now: float) -> str:
    """``pending for 5 min: why``."""
    since = f" for {duration_text(now - view.submitted)}" if view.submitted is not None else ""
    return f"{view.state}{since}: {view.detail}"


def _warning(view: RunView, has_queue: bool, now: float) -> tuple[str, str]:
    """Topic and words of a warning; the topic prevents repetition. Both are empty without a warning."""
    if view.state is JobState.PENDING and has_queue and view.detail:
        # The expected start changes with every cycle of the scheduler.
        return view.detail.partition("; expected to start ")[0], pending_words(view, now)
    # The log has a line of its own at the start of a build.
    is_building = view.detail.startswith(KERNEL_BUILD)
    if (
        view.state in (JobState.RUNNING, JobState.UNKNOWN)
        and view.detail not in ("", "starting", "ending")
        and not is_building
    ):
        return view.state.value, view.summary
    return "", ""


def _train_iters(record: RunRecord) -> int | None:
    value = (record.config or {}).get("training", {}).get("train_iters")
    return value if isinstance(value, int) else None
