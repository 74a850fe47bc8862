"""The plan of a run on the screen: about ten lines that ``submit`` and ``--dry-run`` show."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmctl.context import Context

if TYPE_CHECKING:
    from llmctl.submit.job import SubmitPlan
    from llmctl.submit.preview.place import Preview

_LABEL = 10
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
    width = max(_NARROWEST, shutil.get_terminal_size().columns) if stream.isatty() else 0
    for label, text in _preview(plan, context, asks=asks).rows:
        indent = " " * (_LABEL + 2)
        parts = textwrap.wrap(text, width - len(indent), break_long_words=False) if width else [text]
        yield f"  {label:{_LABEL}}{parts[0]}"
        yield from (f"{indent}{part}" for part in parts[1:])


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
