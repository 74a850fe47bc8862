"""What is said while kernels are built: a bar on a terminal, two lines elsewhere. Torch-free."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LineReport:
    """Says when a build begins and when it is done."""

    def say(self, line: str) -> None:
        """A line on standard output."""
        print(line, flush=True)

    @contextmanager
    def building(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """One line before, one after."""
        self.say(f"kernels: building {what}, once for this machine")
        began = time.monotonic()
        yield lambda *_: None
        self.say(f"kernels: built in {time.monotonic() - began:.0f} s")


class TerminalReport(LineReport):
    """Shows a bar meanwhile."""

    @contextmanager
    def building(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A bar, which leaves a line."""
        from rich.progress import Progress

        began = time.monotonic()
        with Progress(transient=True) as bar:
            task = bar.add_task(f"building {what}", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        self.say(f"kernels: built {what} in {time.monotonic() - began:.0f} s")


def report_here() -> LineReport:
    """The report that suits standard output."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return TerminalReport()
    return LineReport()
