"""Output of ``submit`` and ``resume``: show a plan, execute it, and report the result."""

import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmctl.cli.console import print_json, say

if TYPE_CHECKING:
    from llmctl.context import Context
    from llmctl.runs.record import RunRecord
    from llmctl.submit.plan import Plan


def show_plan(plan: "Plan", context: "Context", *, as_json: bool, more: Mapping[str, Any]) -> None:
    """``--dry-run``: print the script and the submit commands, byte for byte. Writes nothing.

    Args:
        plan: the plan to show.
        context: this call of llmctl.
        as_json: print one JSON document instead.
        more: further fields of the document.
    """
    _say_beforehand(plan, context)
    if not as_json:
        sys.stdout.flush()
        sys.stdout.buffer.write(plan.rendered.as_bytes())
        return
    commands = [{"host": command.host, "argv": command.argv} for command in plan.rendered.commands]
    print_json({**_summary(plan.record, plan), **more, "script": plan.rendered.script, "commands": commands})


def carry_out(plan: "Plan", context: "Context", *, as_json: bool, follow: bool, more: Mapping[str, Any]) -> "RunRecord":
    """Submit and report; returns the record with the new submission.

    Args:
        plan: the plan to execute.
        context: this call of llmctl.
        as_json: print one JSON document on standard output.
        follow: the caller follows the run, so the report is shorter.
        more: further fields of the document.
    """
    from llmctl.submit.execute import execute_plan

    _say_beforehand(plan, context)
    if plan.job.profile.notice:
        from llmctl.operate.notices import remember_site_message

        with suppress(OSError):  # on failure, the message appears again next time
            remember_site_message(plan.job.profile, context.folders)
    record = execute_plan(plan, context, say)
    if as_json:
        print_json({**_summary(record, plan), **more})
        sys.stdout.flush()
        return record
    jobs = ", ".join(dict.fromkeys(job.job_id for job in record.submissions[-1].jobs))
    queue = f" in queue {plan.job.request.queue}" if plan.job.request.queue else ""
    how = f"job {jobs}{queue} on {record.cluster}" if plan.job.queue is not None else f"started on {record.cluster}"
    if not follow:
        print(record.run_id)
        say(f"{how}: {record.run_dir}\nllmctl logs -f {record.run_id}")
    elif plan.job.queue is not None:
        say(f"{record.run_id}: {how}")
    return record


def follow_started(record: "RunRecord", context: "Context", *, as_json: bool) -> int:
    """Follow the run until it ends; returns the exit code.

    Args:
        record: the run's record.
        context: this call of llmctl.
        as_json: standard output holds a document, so the followed log goes to standard error.
    """
    from llmctl.context import ClusterSession
    from llmctl.operate.follow import follow_run
    from llmctl.operate.follow_output import PlainOutput

    session = ClusterSession.of(context, record.cluster, f"run {record.run_id}")
    output = PlainOutput(sys.stderr) if as_json else None
    return follow_run(record, session.transport, backend=session.backend, output=output)


def _say_beforehand(plan: "Plan", context: "Context") -> None:
    """Print the site message, warnings and cost before the job is submitted."""
    profile, lines = plan.job.profile, [*plan.warnings]
    if profile.notice:
        from llmctl.operate.notices import unseen_site_message

        notice = unseen_site_message(profile, context.folders)
        lines = [*([f"{profile.name}: {notice}"] if notice else []), *lines]
    if plan.job.cost is not None:
        lines.append(f"asks for {plan.job.cost}")
    if lines:
        say("\n".join(lines))


def _summary(record: "RunRecord", plan: "Plan") -> dict[str, Any]:
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
