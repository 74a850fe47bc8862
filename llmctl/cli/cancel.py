"""``llmctl cancel``: end runs and all of their processes."""

from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import Context, say
from llmctl.errors import LlmctlError
from llmctl.operate.cancel import GRACE_S, cancel_entry
from llmctl.terminal_text import printable

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
            cancelled = cancel_entry(context, context.index.find(reference), grace_s=grace)
            print(printable(cancelled.sentence), flush=True)
        except LlmctlError as error:
            if len(runs) == 1:
                raise
            say(f"llmctl: {error.message}")
            exit_code = exit_code or error.exit_code
    return exit_code
