"""How ``submit`` and ``resume`` show a plan and what came of it."""

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.cli.console import print_json, say

if TYPE_CHECKING:
    from llmctl.invocation import Invocation
    from llmctl.run_record import RunRecord
    from llmctl.submission import Plan


def show_plan(plan: "Plan", *, as_json: bool, more: Mapping[str, Any]) -> None:
    """``--dry-run``: the script and the submit commands, byte for byte what would be run.

    Args:
        plan: what would be done.
        as_json: as one JSON document instead.
        more: further fields of the document.
    """
    if not as_json:
        sys.stdout.flush()
        sys.stdout.buffer.write(plan.rendered.as_bytes())
        return
    commands = [{"host": command.host, "argv": command.argv} for command in plan.rendered.commands]
    print_json({**_summary(plan.record, plan), **more, "script": plan.rendered.script, "commands": commands})


def show_started(
    record: "RunRecord",
    plan: "Plan",
    invocation: "Invocation",
    *,
    as_json: bool,
    follow: bool,
    more: Mapping[str, Any],
) -> int:
    """Say what was started, and follow it if that was asked for; returns the exit code.

    Args:
        record: with the new submission.
        plan: that was carried out.
        invocation: of this call.
        as_json: one JSON document on standard output; what is followed then goes to standard error.
        follow: show the run until it ends.
        more: further fields of the document.
    """
    if as_json:
        print_json({**_summary(record, plan), **more})
        sys.stdout.flush()
    elif not follow:
        print(record.run_id)
        say(f"started on {record.cluster}: {record.run_dir}\nllmctl logs -f {record.run_id}")
    if not follow:
        return 0
    from llmctl.follow import follow_run
    from llmctl.follow_output import PlainOutput

    return follow_run(record, invocation.transport, output=PlainOutput(sys.stderr) if as_json else None)


def _summary(record: "RunRecord", plan: "Plan") -> dict[str, Any]:
    jobs = record.submissions[-1].jobs if record.submissions else ()
    return {
        "run_id": record.run_id,
        "name": record.name,
        "cluster": record.cluster,
        "run_dir": str(record.run_dir),
        "job_ids": [job.job_id for job in jobs],
        "submitted": [shlex.join(command.argv) for command in plan.rendered.commands],
    }
