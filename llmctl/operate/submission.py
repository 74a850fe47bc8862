"""The facts of a plan before and after its submission, as commands and the Python API report them."""

import shlex
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from llmctl.context import Context

if TYPE_CHECKING:
    from llmctl.runs.record import RunRecord
    from llmctl.submit.job import SubmitPlan
    from llmctl.submit.preview.place import Preview


def dry_run_document(plan: "SubmitPlan", context: Context, more: Mapping[str, Any]) -> dict[str, Any]:
    """The document of ``--dry-run --json``.

    Args:
        plan: of the submission.
        context: this call of llmctl.
        more: further fields.
    """
    commands = [{"host": command.host, "argv": command.argv} for command in plan.rendered.commands]
    script = {"script": plan.rendered.script, "commands": commands}
    return {**_summary(plan.record, plan), "plan": _facts(plan, context, asks=False), **more, **script}


def submitted_document(
    record: "RunRecord", plan: "SubmitPlan", context: Context, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of ``--json`` after a submission, with the same arguments."""
    return {**_summary(record, plan), "plan": _facts(plan, context, asks=True), **more}


def _summary(record: "RunRecord", plan: "SubmitPlan") -> dict[str, Any]:
    jobs = record.submissions[-1].jobs if record.submissions else ()
    return {
        "run_id": record.run_id,
        "name": record.name,
        "cluster": record.cluster,
        "run_dir": str(record.run_dir),
        "job_ids": [job.job_id for job in jobs],
        "queue": plan.job.request.queue,
        "cost": plan.job.cost.as_json() if plan.job.cost is not None else None,
        "submitted": [shlex.join(command.argv) for command in plan.rendered.commands],
    }


def _facts(plan: "SubmitPlan", context: Context, *, asks: bool) -> dict[str, Any]:
    preview = preview_of_job(plan, context, asks=asks)
    return {**preview.facts, "rows": dict(preview.rows)}


def preview_of_job(plan: "SubmitPlan", context: Context, *, asks: bool) -> "Preview":
    """Rows and numbers of a plan.

    Args:
        plan: of the submission.
        context: this call of llmctl.
        asks: False for a dry run, which does not contact another machine.
    """
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
