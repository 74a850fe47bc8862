"""The plan of a run on the screen: about ten lines that ``submit`` and ``--dry-run`` show."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from llmctl.context import Context

if TYPE_CHECKING:
    from llmctl.submit.job import SubmitPlan

_LABEL = 10
INDENT = _LABEL + 2
"""Columns before the text of a row."""
_NARROWEST = 60


def plan_lines(plan: "SubmitPlan", context: Context, *, asks: bool) -> Iterator[str]:
    """The lines of a plan: the run, then a label and a text each, wrapped at the width of a terminal.

    Args:
        plan: of the submission.
        context: this call of llmctl.
        asks: False for a dry run, which does not contact another machine.
    """
    from llmctl.operate.submission import preview_of_job

    # A dry run is the output of the command; before a submission, the page is a message beside it.
    stream = sys.stderr if asks else sys.stdout
    yield f"{plan.record.run_id} on {plan.job.profile.name}"
    yield from labelled_lines(preview_of_job(plan, context, asks=asks).rows, stream)


def labelled_lines(rows: Iterable[tuple[str, str]], stream: TextIO) -> Iterator[str]:
    """A label and a text on each line; what is too long for a terminal goes on below the text."""
    width = terminal_width(stream)
    for label, text in rows:
        parts = _wrapped(text, width - INDENT) if width else [text]
        yield f"  {label:{_LABEL}}{parts[0]}"
        yield from (f"{'':{INDENT}}{part}" for part in parts[1:])


def note_lines(notes: Iterable[str], stream: TextIO) -> Iterator[str]:
    """Notes, wrapped on words where the stream is a terminal; elsewhere as they are."""
    width = terminal_width(stream)
    for line in "\n".join(notes).splitlines():
        yield from _wrapped(line, width) if width else [line]


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that the stream leads to; 0 for a file or a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size().columns) if stream.isatty() else 0


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words: a path, a flag or a key is never divided at its hyphens."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
