"""The trackers of one attempt: a thread and a bounded queue each, so that none stops or slows the run. Torch-free.

What goes wrong in a tracker is told once, in the log and beside the phase that ``llmctl status`` shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from typing_extensions import Self

from trainer.config.sections.logging import LoggingConfig
from trainer.process.heartbeat import Heartbeat
from trainer.process.run_directory import RunDirectory
from trainer.trackers.choice import Choice, chosen_trackers
from trainer.trackers.earlier_rows import earlier_rows
from trainer.trackers.protocol import Outcome, RunFacts, Tracker
from trainer.trackers.scalars import scalars_of

_MOST_WAITING = 10_000
"""Rows that wait for one tracker; later rows are lost to it."""
_LONG_CALL_S = 120.0
"""A tracker that is busy with one call for longer is told of."""
_LAST_WAIT_S: Mapping[Outcome, float] = {"completed": 60.0, "stopped": 10.0, "failed": 10.0}
"""Time for the last rows and the end. A stopped run may be killed soon, and a failed one has others that wait."""


class Tracking:
    """All trackers of this rank. A context manager, which ends them; ``outcome`` says how the attempt has ended."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        """Track nothing; warnings go to ``heartbeat``."""
        self.outcome: Outcome = "failed"
        self._heartbeat = heartbeat
        self._interval = 1
        self._choices: list[Choice] = []
        self._threads: list[_TrackerThread] = []

    def choose(self, logging: LoggingConfig) -> None:
        """Choose the trackers of a config, before anything else begins.

        Raises:
            ConfigError: a package is not installed, or a function of the user's own cannot be imported.
        """
        self._choices = chosen_trackers(logging)
        self._interval = logging.tensorboard_log_interval

    def begin(self, facts: RunFacts) -> None:
        """Start the chosen trackers."""
        self._threads = [_TrackerThread(choice, facts, self._tell) for choice in self._choices]
        for thread in self._threads:
            thread.start()

    def log(self, row: Mapping[str, Any], consumed_samples: int, batch_size: int) -> None:
        """Hand a row of metrics.jsonl to all trackers. Waits for nothing."""
        if not self._threads:
            return
        is_training = "lm_loss" in row
        if is_training and row["iteration"] % self._interval:
            return
        more = {"consumed_samples": consumed_samples, **({"batch_size": batch_size} if is_training else {})}
        for thread in self._threads:
            thread.put({**row, **more})

    def _tell(self, key: str, sentence: str) -> None:
        print(f"{key}: {sentence}", flush=True)
        self._heartbeat.warn(f"{key}: {sentence}", about=key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = _LAST_WAIT_S[self.outcome]
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.finish(self.outcome)
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.monotonic()))
            thread.tell_of_its_end(seconds)


def has_hanging_tracker() -> bool:
    """True if a tracker has not ended: the process must then leave without the exit handlers of its package."""
    return any(isinstance(thread, _TrackerThread) for thread in threading.enumerate())


class _TrackerThread(threading.Thread):
    """Makes all calls of one tracker, in order."""

    def __init__(self, choice: Choice, facts: RunFacts, tell: Callable[[str, str], None]) -> None:
        super().__init__(name=f"tracker of {choice.key}", daemon=True)
        self._choice = choice
        self._facts = facts
        self._tell_run = tell
        self._rows: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._outcome: Outcome = "failed"
        self._busy_since: float | None = None
        self._has_told = False
        self._has_begun: bool | None = None
        self._missing = 0

    def put(self, row: Mapping[str, Any]) -> None:
        """Queue a row; it is lost if too many wait, or if the tracker could not begin."""
        since = self._busy_since
        if self._has_begun is False:
            return
        if self._rows.qsize() >= _MOST_WAITING:
            self._missing += 1
            self._tell(f"has {_MOST_WAITING} rows waiting, and gets no more until it has taken some")
            return
        if since is not None and time.monotonic() - since > _LONG_CALL_S:
            self._tell(f"has been busy with one call for over {_LONG_CALL_S:.0f} s")
        self._rows.put(row)

    def finish(self, outcome: Outcome) -> None:
        """Let the thread end after the waiting rows."""
        self._outcome = outcome
        self._rows.put(None)

    def tell_of_its_end(self, waited_s: float) -> None:
        """Tell of a tracker that has not ended, and of rows that it lacks."""
        if self.is_alive():
            self._has_told = False
            self._tell(f"has not ended within {waited_s:.0f} s, and the run ends without it")
        elif self._missing:
            print(f"{self._choice.key}: {self._choice.title} lacks {self._missing} rows of metrics.jsonl", flush=True)

    def run(self) -> None:
        """All calls of the tracker."""
        self._busy_since = time.monotonic()
        try:
            tracker = self._choice.make()
            held = tracker.begin(self._facts)
        except (Exception, SystemExit) as error:
            self._has_begun = False
            self._tell(f"could not begin, and gets no numbers of this attempt: {_described(error)}")
            return
        self._has_begun = True
        if held is not None and self._facts.folder is not None:
            self._log_earlier(tracker, held, RunDirectory(self._facts.folder).metrics)
        self._busy_since = None
        while (row_or_end := self._rows.get()) is not None:
            self._log(tracker, row_or_end)
        try:
            tracker.end(self._outcome)
        except (Exception, SystemExit) as error:
            self._tell(f"failed at its end: {_described(error)}")

    def _log_earlier(self, tracker: Tracker, held: int, metrics: Path) -> None:
        try:
            for row in earlier_rows(metrics, held, self._facts.iteration):
                self._log(tracker, row)
        except Exception as error:
            self._tell(f"could not be given the rows of earlier attempts: {_described(error)}")

    def _log(self, tracker: Tracker, row: Mapping[str, Any]) -> None:
        self._busy_since = time.monotonic()
        try:
            tracker.log(row["iteration"], scalars_of(row))
        except (Exception, SystemExit) as error:
            self._missing += 1
            self._tell(f"failed at iteration {row['iteration']}: {_described(error)}")
        self._busy_since = None

    def _tell(self, sentence: str) -> None:
        """Tell the first trouble only."""
        if not self._has_told:
            self._has_told = True
            rest = "the run goes on, and metrics.jsonl has all numbers"
            self._tell_run(self._choice.key, f"{self._choice.title} {sentence}; {rest}")


def _described(error: BaseException) -> str:
    """Class and first line of an error, which its package may have made long."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__
