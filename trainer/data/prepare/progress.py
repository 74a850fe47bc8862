"""Progress of a preparation: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from typing_extensions import Self

_SECONDS = 10.0
_FIRST_SECONDS = 2.0
_TELLING_BYTES = 1_000_000
"""No rate is reported before so many bytes are done: the processes have only just started."""


class Progress:
    """Reports progress, rate and remaining time of reading on standard error.

    Args:
        total: bytes of input that this node has to do, as far as known.
        documents: minimum number of documents between two lines; not used on a terminal.
    """

    def __init__(self, total: int, documents: int = 0) -> None:
        self._total = total
        self._done = 0
        self._already = 0
        self._documents = 0
        self._said_documents = 0
        self._every = documents
        self._started = time.monotonic()
        self._next = self._started + _FIRST_SECONDS
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = _bar()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total, completed=0, text="")
            self._bar.start()
        return self

    def expect(self, total: int) -> None:
        """Correct the number of bytes that this node has to do."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def skip(self, input_bytes: int) -> None:
        """Count bytes that an earlier run has done."""
        self._done += input_bytes
        self._already += input_bytes

    def advance(self, input_bytes: int, documents: int) -> None:
        """Count bytes and documents that are newly done."""
        self._done += input_bytes
        self._documents += documents
        now = time.monotonic()
        rate = (self._done - self._already) / max(1e-9, now - self._started)
        # This node's share may exceed the estimate.
        done = min(self._total, self._done)
        ends_in = _ends_in(self._total - done, rate if self._done - self._already >= _TELLING_BYTES else 0.0)
        if self._bar is not None:
            text = f"{rate / 1e6:.1f} MB/s  {self._documents:,} documents  {ends_in}"
            self._bar.update(self._task, completed=done, text=text)
        elif now >= self._next and self._documents - self._said_documents >= self._every:
            self._next = now + _SECONDS
            self._said_documents = self._documents
            say(
                f"{done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB ({done / max(1, self._total):.0%}), "
                f"{self._documents:,} documents, {rate / 1e6:.1f} MB/s, {ends_in}"
            )

    def merging(self, done: int, total: int) -> None:
        """Report the number of chunks merged into the output."""
        self._report(done, total, "merging", f"merging: {done:,} of {total:,} parts")

    def waiting(self, done: int, total: int, reason: str) -> None:
        """Report the number of chunks done while this node waits for other nodes."""
        self._report(done, total, reason, reason)

    def _report(self, done: int, total: int, text: str, line: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, text=text)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            say(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def say(line: str) -> None:
    """Print a line for the user, and flush."""
    print(line, file=sys.stderr, flush=True)


def _ends_in(left: int, rate: float) -> str:
    if left and rate <= 0:
        return "end unknown"
    return f"{_clock(left / rate if left else 0)} left"


def _clock(duration_s: float) -> str:
    seconds = round(duration_s)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    except ModuleNotFoundError:
        # The Python of a job has only the packages that training needs.
        return None
    return Progress(
        BarColumn(None), TaskProgressColumn(), TextColumn("{task.fields[text]}"), console=Console(stderr=True)
    )
