"""``llmctl report``: runs as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import Context
from llmctl.runs.index import IndexEntry

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def report(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    output: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="The page. Default: report-RUN.html, here.")
    ] = None,
) -> None:
    """Write one HTML page about runs: curves, attempts, lost time, plan beside measured, cost, config.

    The page needs no network and no other file. A page of an earlier report is replaced, any other file never.
    """
    context: Context = ctx.obj
    entries = list(dict.fromkeys(context.index.find(name) for name in runs))
    target = context.cwd / Path(output if output is not None else _default_name(entries)).expanduser()
    from llmctl.cli.viewing.replaced_file import check_ours, replace_file
    from llmctl.operate.report.gather import gather_runs
    from llmctl.operate.report.page import MARK, page_of

    check_ours(target, MARK, "a page of llmctl report")
    page = page_of(gather_runs(context, entries)).encode()
    replace_file(target, page)
    print(output if output is not None else target.name)


def _default_name(entries: list[IndexEntry]) -> str:
    more = len(entries) - 1
    return f"report-{entries[0].run_id}{f'-and-{more}-more' if more else ''}.html"
