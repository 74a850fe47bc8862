"""``llmctl cancel``: end runs and all of their processes."""

import time
from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import ClusterSession, Context, say
from llmctl.errors import LlmctlError, RecordError
from llmctl.job_state import JobState
from llmctl.operate.cancel import GRACE_S, cancel_run, end_without_record
from llmctl.runs.record import RunRecord
from llmctl.terminal_text import printable

TELLS_WHY = (JobState.FAILED, JobState.TIMEOUT, JobState.PREEMPTED, JobState.NODE_FAIL)
"""Ends with a reason, which may be long."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def cancel(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="Time to save before all processes are killed.")
    ] = GRACE_S,
) -> int:
    """End runs. The trainer saves at its next step; processes left after the grace period are killed."""
    context: Context = ctx.obj
    exit_code = 0
    for reference in runs:
        try:
            print(printable(_cancel(context, reference, grace)), flush=True)
        except LlmctlError as error:
            if len(runs) == 1:
                raise
            say(f"llmctl: {error.message}")
            exit_code = exit_code or error.exit_code
    return exit_code


def _cancel(context: Context, reference: str, grace_s: float) -> str:
    entry = context.index.find(reference)
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    try:
        record = RunRecord.load_own(entry.run_dir, session.transport)
    except RecordError as error:
        ended = end_without_record(entry.run_dir, session.transport, session.backend, grace_s=grace_s)
        if not ended:
            raise
        return f"{entry.run_id}: ended {ended}; {error.message}"
    outcome = cancel_run(record, session.transport, session.backend, grace_s=grace_s)
    view = outcome.view
    if view.state.is_finished:
        session.remove_secrets(context, [record])
    context.index.update_state(view.run_id, view.state.value, time.time())
    if outcome.had_ended:
        how = f"; llmctl status {view.run_id} tells why" if view.state in TELLS_WHY else ""
        return f"{view.run_id} had already ended: {view.state}{how}"
    return f"{view.run_id}: {view.detail or view.state}"
