"""The plan of a run on the screen: about ten lines that ``submit`` and ``--dry-run`` show."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from llmctl.context import Context

if TYPE_CHECKING:
    from llmctl.submit.job import SubmitPlan
    from llmctl.submit.preview.place import Preview


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
    # A dry run is the output of the command; before a submission, the page is a message beside it.
    stream = sys.stderr if asks else sys.stdout
    yield f"{plan.record.run_id} on {plan.job.profile.name}"
    yield from labelled_lines(_preview(plan, context, asks=asks).rows, stream)


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


def plan_facts(plan: "SubmitPlan", context: Context, *, asks: bool) -> Mapping[str, Any]:
    """The numbers of a plan, for ``--json``."""
    preview = _preview(plan, context, asks=asks)
    return {**preview.facts, "rows": dict(preview.rows)}


def _preview(plan: "SubmitPlan", context: Context, *, asks: bool) -> "Preview":
    job = plan.job
    if job.config is None:
        from llmctl.submit.preview.place import command_preview

        return command_preview(job)
    from llmctl.site.container import on_host
    from llmctl.submit.preview.preview import preview_of
    from llmctl.submit.start_model import TransportFiles

    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    if job.is_remote and not asks:
        return preview_of(plan, _NoFiles(), context.transport, None)
    transport = context.connect(job.profile)
    save = job.config.checkpoint.save or str(job.run_dir)
    facts = transport.stat_paths([on_host(save, mounts) or save])[0]
    # On a machine that has nothing of the path, the cluster's file system is not mounted.
    free = facts.free_bytes if facts.nearest != "/" else None
    return preview_of(plan, TransportFiles(transport, mounts), context.transport, free)


class _NoFiles:
    """Files of a machine that a dry run does not contact."""

    def names(self, folder: str) -> Collection[str]:  # noqa: ARG002
        """See trainer.planning.start_model.Files."""
        return ()

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:  # noqa: ARG002
        """See trainer.planning.start_model.Files."""
        return None
