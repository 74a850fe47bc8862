"""Output of a followed run: plain lines in a pipe; on a terminal, a progress line below."""

import re
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, TextIO

from typing_extensions import Self

from llmctl.durations import short_duration
from llmctl.runs.metrics import MetricsTable, Row, number
from llmctl.runs.number_text import loss_text, rate_text
from llmctl.terminal_text import printable

_STEP = re.compile(r"\d+/\d+  loss ")
"""Start of the trainer's line about a training step."""


class FollowOutput(Protocol):
    """Shows lines and progress; a context manager.

    Attributes:
        shows_progress: True if ``progress`` shows anything; otherwise the caller need not read metrics.
    """

    shows_progress: bool

    def __enter__(self) -> Self:
        """Start the display."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal."""

    def show(self, lines: Sequence[str]) -> None:
        """Show log lines."""

    def warning(self, text: str) -> None:
        """Show a message from llmctl itself, not from the run."""

    def progress(self, metrics: MetricsTable, state: str) -> None:
        """Show the run's progress."""


class PlainOutput:
    """Lines as they come, warnings on standard error, no progress line."""

    shows_progress = False

    def __init__(self, stream: TextIO | None = None) -> None:
        """Show lines on ``stream``; None is standard output."""
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, lines: Sequence[str]) -> None:
        """Print and flush at once for the reader of the pipe."""
        if lines:
            print("\n".join(lines), file=self._stream, flush=True)

    def warning(self, text: str) -> None:
        """Print on standard error, so that the pipe carries only the log."""
        print(printable(text), file=sys.stderr, flush=True)

    def progress(self, metrics: MetricsTable, state: str) -> None:
        """Show nothing."""


class TerminalOutput(PlainOutput):
    """A progress line at the bottom, with the log scrolling above."""

    shows_progress = True

    def __init__(self, name: str, train_iters: int | None) -> None:
        """Show the run ``name``; without ``train_iters`` (a COMMAND), the progress line holds only the state."""
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

        self._train_iters = train_iters
        self._last_step = ""
        columns: list[ProgressColumn] = [
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[text]}", markup=False),
        ]
        if train_iters:
            columns.insert(1, BarColumn(bar_width=24))
        self._progress = Progress(*columns, console=Console(highlight=False), transient=True)
        self._task = self._progress.add_task(printable(name), total=train_iters or None, text="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print([self._last_step] if self._last_step else [])
        self._progress.stop()

    def show(self, lines: Sequence[str]) -> None:
        """Show log lines above the progress line; of the lines about steps, only the last one before another line."""
        shown = []
        for line in lines:
            if _STEP.match(line):
                self._last_step = line
                continue
            shown += [self._last_step, line] if self._last_step else [line]
            self._last_step = ""
        self._print(shown)

    def _print(self, lines: Sequence[str]) -> None:
        if lines:
            # Soft-wrapped by the terminal, so that a copied line stays whole.
            self._progress.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def warning(self, text: str) -> None:
        """Show a message above the progress line."""
        self._progress.console.print(printable(text), style="yellow", markup=False, soft_wrap=True)

    def progress(self, metrics: MetricsTable, state: str) -> None:
        """Show iteration, loss, tokens/s and the time left at the present pace."""
        row = metrics.newest
        if row is None:
            self._progress.update(self._task, text=printable(state))
            return
        self._progress.update(
            self._task,
            completed=row["iteration"],
            text=progress_text(row, self._train_iters, metrics.iteration_time_s()),
        )


def progress_text(row: Row, train_iters: int | None, iteration_time_s: float | None) -> str:
    """Known parts of ``120/600 | loss 4.123 | 5.12k tokens/s | ETA 1m42s``.

    Args:
        row: the newest row of metrics.
        train_iters: last iteration of the run.
        iteration_time_s: present seconds per iteration.
    """
    parts = [f"{row['iteration']}/{train_iters}" if train_iters is not None else f"{row['iteration']}"]
    loss, tokens_per_s = number(row, "lm_loss"), number(row, "tokens_per_s")
    if loss is not None:
        parts.append(f"loss {loss_text(loss)}")
    if tokens_per_s is not None:
        parts.append(f"{rate_text(tokens_per_s)} tokens/s")
    if train_iters is not None and iteration_time_s is not None:
        parts.append(f"ETA {short_duration((train_iters - row['iteration']) * iteration_time_s)}")
    return " | ".join(parts)


def choose_output(name: str, train_iters: int | None) -> FollowOutput:
    """Choose a progress line on a terminal, plain lines in a pipe."""
    return TerminalOutput(name, train_iters) if sys.stdout.isatty() else PlainOutput()
