"""The facts of a plan before and after its submission, as commands and the Python API report them."""

import shlex
from collections.abc import Collection
from typing import TYPE_CHECKING

from typing_extensions import NotRequired, TypedDict

from llmctl.context import Context
from llmctl.submit.job import BadNodeFacts, JobCostFacts, bad_node_facts
from llmctl.submit.preview.place import CommandPlan, TrainingPlan

if TYPE_CHECKING:
    from llmctl.runs.record import RunRecord
    from llmctl.submit.job import SubmitPlan
    from llmctl.submit.preview.place import Preview


class HostedCommand(TypedDict):
    """One command of a submission."""

    host: str
    """Name of the host; ``login`` is the machine of the scheduler's commands."""
    argv: list[str]
    """Program and arguments."""


class SubmitDocument(TypedDict):
    """The facts of a submission, or of its dry run."""

    run_id: str
    """The run."""
    name: str
    """The user's name for the run."""
    cluster: str
    """Name of the profile."""
    run_dir: str
    """Directory of the run, on the cluster."""
    job_ids: list[str]
    """Ids of the jobs of this submission, one for each host; empty for a dry run."""
    queue: str | None
    """Queue or partition; null for the site's default, and where there are no queues."""
    cost: JobCostFacts | None
    """Size of the request and its largest charge; null where there is no scheduler."""
    left_out: list[BadNodeFacts]
    """Nodes of the user's list of bad nodes that the job leaves out."""
    submitted: list[str]
    """The commands that submit, each quoted for a shell."""
    plan: TrainingPlan | CommandPlan
    """The plan; that of a COMMAND has only its rows."""
    resumes_from: NotRequired[int | None]
    """Iteration of the checkpoint; null if only the job can find it."""
    script: NotRequired[str]
    """Content of job.sh."""
    commands: NotRequired[list[HostedCommand]]
    """The commands that would submit, with their hosts."""


class Resumed(TypedDict):
    """Further facts of a submission by ``llmctl resume``."""

    resumes_from: int | None
    """See SubmitDocument."""


def dry_run_document(plan: "SubmitPlan", context: Context, more: Resumed | None) -> SubmitDocument:
    """The document of ``--dry-run --json``.

    Args:
        plan: of the submission.
        context: this call of llmctl.
        more: further fields of a resume.
    """
    document = _document(plan.record, plan, _facts(plan, context, asks=False), more)
    document["script"] = plan.rendered.script
    document["commands"] = [{"host": command.host, "argv": [*command.argv]} for command in plan.rendered.commands]
    return document


def submitted_document(
    record: "RunRecord", plan: "SubmitPlan", context: Context, more: Resumed | None
) -> SubmitDocument:
    """The document of ``--json`` after a submission, with the same arguments."""
    return _document(record, plan, _facts(plan, context, asks=True), more)


def _document(
    record: "RunRecord", plan: "SubmitPlan", facts: TrainingPlan | CommandPlan, more: Resumed | None
) -> SubmitDocument:
    jobs = record.submissions[-1].jobs if record.submissions else ()
    document: SubmitDocument = {
        "run_id": record.run_id,
        "name": record.name,
        "cluster": record.cluster,
        "run_dir": str(record.run_dir),
        "job_ids": [job.job_id for job in jobs],
        "queue": plan.job.request.queue,
        "cost": plan.job.cost.as_json() if plan.job.cost is not None else None,
        "left_out": [bad_node_facts(bad) for bad in plan.job.left_out],
        "submitted": [shlex.join(command.argv) for command in plan.rendered.commands],
        "plan": facts,
    }
    if more is not None:
        document["resumes_from"] = more["resumes_from"]
    return document


def _facts(plan: "SubmitPlan", context: Context, *, asks: bool) -> TrainingPlan | CommandPlan:
    preview = preview_of_job(plan, context, asks=asks)
    rows = dict(preview.rows)
    return {"rows": rows} if preview.facts is None else {**preview.facts, "rows": rows}


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
        return preview_of(plan, _NoFiles(), context.transport, None, context.folders)
    transport = context.connect(job.profile)
    save = job.config.checkpoint.save or str(job.run_dir)
    facts = transport.stat_paths([on_host(save, mounts) or save])[0]
    # On a machine that has nothing of the path, the cluster's file system is not mounted.
    free = facts.free_bytes if facts.nearest != "/" else None
    return preview_of(plan, TransportFiles(transport, mounts), context.transport, free, context.folders)


class _NoFiles:
    """Files of a machine that a dry run does not contact."""

    def names(self, folder: str) -> Collection[str]:  # noqa: ARG002
        """See trainer.planning.start_model.Files."""
        return ()

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:  # noqa: ARG002
        """See trainer.planning.start_model.Files."""
        return None
